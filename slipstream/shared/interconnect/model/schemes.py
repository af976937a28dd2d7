"""Ring, tree and star schemes, which predict an operation's time for other numbers of ranks.

A scheme states the number of rounds of an operation and the fraction of its size that a rank sends per round. For
example, n ranks reduce in a ring in 2 (n - 1) rounds of 1/n each (Patarasuk and Yuan 2009; Thakur, Rabenseifner and
Gropp 2005). A scheme is used for predictions only after it has predicted held-out measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.shared.interconnect.model.hockney import Hockney, TimeEstimate, fit_hockney
from slipstream.shared.interconnect.profile import Measurement, NetworkProfile

#: Relative error above which a scheme is rejected.
TOLERATED = 0.2


@dataclass(frozen=True)
class Scheme:
    """Scheme with ``rounds(n)`` rounds for n ranks, in which a rank sends ``share(n)`` of the size."""

    name: str
    rounds: Callable[[int], int]
    share: Callable[[int], float]

    def seconds(self, message: Hockney, world: int, size: float) -> TimeEstimate:
        """Return the operation's time under the ``message`` model."""
        return message.seconds(size * self.share(world)).times(self.rounds(world))


def tree_depth(world: int) -> int:
    return (world - 1).bit_length()


RING = Scheme("ring", lambda n: n - 1, lambda n: 1 / n)
TREE = Scheme("tree", tree_depth, lambda n: 1.0)
#: Sizes follow nccl-tests, so an all_gather of S bytes moves S/n from each rank.
SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "all_reduce": (
        Scheme("ring", lambda n: 2 * (n - 1), lambda n: 1 / n),
        Scheme("tree", lambda n: 2 * tree_depth(n), lambda n: 1.0),
    ),
    "all_gather": (RING,),
    "reduce_scatter": (RING,),
    "all_to_all": (RING,),
    # A chain in which small chunks are pipelined takes as long as one message.
    "broadcast": (TREE, Scheme("ring", lambda n: 1, lambda n: 1.0)),
    "reduce": (TREE, Scheme("ring", lambda n: 1, lambda n: 1.0)),
    "gather": (Scheme("star", lambda n: n - 1, lambda n: 1 / n),),
    "scatter": (Scheme("star", lambda n: n - 1, lambda n: 1 / n),),
}


@dataclass(frozen=True)
class SchemeFit:
    """Errors of an operation's schemes on held-out measurements."""

    operation: str
    #: Best scheme among those that predicted all of them to within ``TOLERATED``; None if there is none.
    scheme: Scheme | None
    #: Worst relative error of every scheme: (predicted - measured) / measured.
    errors: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        tried = ", ".join(f"{name} {error:+.0%}" for name, error in self.errors)
        if self.scheme is None:
            return f"{self.operation} follows none of the known schemes ({tried}): no prediction"
        return f"{self.operation} follows the {self.scheme.name} ({tried})"


def message_model(scheme: Scheme, measured: Sequence[Measurement]) -> Hockney:
    """Fit the message model to measurements of an operation that is assumed to follow ``scheme``.

    Several world sizes may be mixed. Raises ``ValueError`` for fewer than 3 message sizes.
    """
    points: dict[float, list[float]] = {}
    for each in measured:
        rounds, message = scheme.rounds(each.world), each.bytes * scheme.share(each.world)
        points.setdefault(message, []).extend(launch.median / rounds for launch in each.launches)
    return fit_hockney(points)


def evaluate_schemes(operation: str, message: Hockney, held_out: Sequence[Measurement]) -> SchemeFit:
    """Test the operation's schemes on measurements that ``message`` was not fitted to."""
    return best_fit(operation, {scheme: error_of(scheme, message, held_out) for scheme in SCHEMES.get(operation, ())})


def evaluate_schemes_by_world(operation: str, worlds: Sequence[Sequence[Measurement]]) -> SchemeFit:
    """Test the operation's schemes by holding out every number of processes in turn.

    The largest size at the held-out number is predicted from the other numbers. ``worlds`` has the measurements of
    every number, sorted by size. Raises ``ValueError`` for fewer than 3 message sizes.
    """

    def errors(scheme: Scheme) -> Iterator[float]:
        for held_out in worlds:
            others = [m for world in worlds if world is not held_out for m in world]
            yield error_of(scheme, message_model(scheme, others), held_out[-1:])

    return best_fit(operation, {scheme: max(errors(scheme), key=abs) for scheme in SCHEMES[operation]})


def error_of(scheme: Scheme, message: Hockney, held_out: Sequence[Measurement]) -> float:
    """Return the largest relative error by magnitude: (predicted - measured) / measured."""
    return max((scheme.seconds(message, m.world, m.bytes).seconds / m.p50 - 1 for m in held_out), key=abs)


def best_fit(operation: str, errors: Mapping[Scheme, float]) -> SchemeFit:
    passed = [scheme for scheme, error in errors.items() if abs(error) <= TOLERATED]
    best = min(passed, key=lambda scheme: abs(errors[scheme]), default=None)
    return SchemeFit(operation, best, tuple((scheme.name, error) for scheme, error in errors.items()))


def shared_cores(profile: NetworkProfile, world: int) -> str:
    """Return why cores instead of the network would limit ``world`` ranks; "" if they would not."""
    cores = sum(host.cores for host in profile.topology.hosts)
    if profile.topology.loopback and world > cores:
        return f"{world} ranks share {cores} cores over loopback"
    return ""
