"""Schemes of collectives, and predictions from a profile as text, for other operations and more ranks.

They follow from the scheme of all_reduce and its message time, both fitted to the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from slipstream.shared.interconnect.model.hockney import Compute, Hockney, TimeEstimate, fit_hockney, predict_step_time
from slipstream.shared.interconnect.profile import Measurement, ModelPoint, NetworkProfile

# A scheme states the number of rounds of an operation and the fraction of its size that a rank sends per round. For
# example, n ranks reduce in a ring in 2 (n - 1) rounds of 1/n each (Patarasuk and Yuan 2009; Thakur, Rabenseifner and
# Gropp 2005). A scheme is used for predictions only after it has predicted held-out measurements.
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


FEWEST_SIZES = 3
DEFAULT_SCHEME = SCHEMES["all_reduce"][0]


@dataclass(frozen=True)
class AllReduce:
    """Scheme of all_reduce, and its fitted message time."""

    scheme: Scheme
    message: Hockney
    #: Test of the schemes on each number of processes, after a fit to the others; None if only one number was measured.
    tested: SchemeFit | None

    def seconds(self, world: int, size: float) -> TimeEstimate:
        return self.scheme.seconds(self.message, world, size)


def all_reduce_model(profile: NetworkProfile) -> AllReduce | str:
    """Return the all_reduce model fitted to all numbers of processes, or the reason why there is none.

    With one measured number, a ring is assumed. Otherwise each number is held out in turn from a fit to the others,
    which selects the scheme.
    """
    here = profile.fingerprint.world
    if here < 2:
        return "a single process has no link"
    if reason := shared_cores(profile, here):
        return reason
    worlds = [profile.of("all_reduce", world=world) for world in (*smaller_worlds(profile), here)]
    if len(worlds[-1]) < FEWEST_SIZES:
        return f"the profile has under {FEWEST_SIZES} sizes of all_reduce"
    tested = evaluate_schemes_by_world("all_reduce", worlds) if len(worlds) > 1 else None
    if tested and tested.scheme is None:
        return str(tested).removesuffix(": no prediction")
    scheme = tested.scheme if tested and tested.scheme else DEFAULT_SCHEME
    message = message_model(scheme, list(chain.from_iterable(worlds)))
    if message.error > TOLERATED:
        return f"a latency and a bandwidth do not explain the all_reduce ({off(message)})"
    return AllReduce(scheme, message, tested)


def smaller_worlds(profile: NetworkProfile) -> list[int]:
    """Return the numbers of processes below the whole group for which all_reduce was measured."""
    return sorted({m.world for m in profile.measurements if m.operation == "all_reduce"} - {profile.fingerprint.world})


def off(message: Hockney) -> str:
    return f"held-out sizes are off by {message.error:.0%}"


CURVE_POINTS = 60
NO_STEPS = "steps between more ranks are not predicted"


def model_lines(profile: NetworkProfile) -> Iterator[str]:
    """Yield the message model of all_reduce, the schemes of other operations, and predictions for more ranks."""
    here, model = profile.fingerprint.world, all_reduce_model(profile)
    if isinstance(model, str):
        if profile.of("all_reduce") and here > 1:
            yield f"{model}: no prediction"
        return
    message = model.message
    breaks = "".join(f", another from {int(size)} bytes" for size in message.breaks)
    if model.tested:
        *most, last = map(str, (*smaller_worlds(profile), here))
        yield f"{model.tested}: each of {', '.join(most)} and {last} ranks from the others"
    yield (
        f"a message takes {message.latency * 1e6:.0f} us and its bytes at {message.bandwidth / 1e9:.3g} GB/s{breaks}, "
        f"{'as' if model.tested else 'if'} all_reduce is a {model.scheme.name} ({off(message)})"
    )
    for name in dict.fromkeys(m.operation for m in profile.measurements):
        if name in SCHEMES and name != "all_reduce":
            worlds = (here, *smaller_worlds(profile))
            yield str(
                evaluate_schemes(name, message, [m for world in worlds for m in profile.of(name, world=world)[-1:]])
            )
    size = profile.of("all_reduce")[-1].bytes
    for world in (2 * here, 4 * here):
        if shared_cores(profile, world):
            return
        expected = model.seconds(world, size)
        yield (
            f"all_reduce of {size} bytes between {world} ranks: {expected.milliseconds} expected, on the same kind of "
            "interconnect"
        )


def model_curve(profile: NetworkProfile) -> list[ModelPoint]:
    """Return the modelled all_reduce times over the measured sizes; empty without a model."""
    model = all_reduce_model(profile)
    if isinstance(model, str):
        return []
    measured, world = profile.of("all_reduce"), profile.fingerprint.world
    sizes = np.geomspace(measured[0].bytes, measured[-1].bytes, CURVE_POINTS).round().astype(int).tolist()
    estimates = [(size, model.seconds(world, size)) for size in sizes]
    return [ModelPoint(bytes=size, seconds=e.seconds, low=e.low, high=e.high) for size, e in estimates]


def step_lines(profile: NetworkProfile | None, compute: Compute) -> Iterator[str]:
    """Yield predicted step times for the measured and larger numbers of ranks, or why there are none.

    ``compute`` was measured; ``profile`` is None if the history has none for this hardware.
    """
    if profile is None:
        yield f"{NO_STEPS}: the history has no profile of this hardware; run the benchmark first"
        return
    here, model = profile.fingerprint.world, all_reduce_model(profile)
    if isinstance(model, str):
        yield f"{NO_STEPS}: {model}"
        return
    for world in (here, 2 * here, 4 * here):
        if shared_cores(profile, world):
            return
        expected = predict_step_time(compute, partial(model.seconds, world))
        share = expected.efficiency
        yield (
            f"a step between {world} ranks: {expected.step.milliseconds} expected; computation takes "
            f"{share.seconds:.0%} ({share.low:.0%} to {share.high:.0%}) of it"
        )
