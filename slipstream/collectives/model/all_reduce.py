"""What all_reduce follows and how long its messages take, fitted to a profile: what predictions rest on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from slipstream.collectives.model.hockney import Estimate, Hockney
from slipstream.collectives.model.schemes import (
    SCHEMES,
    TOLERATED,
    Scheme,
    SchemeFit,
    evaluate_schemes_by_world,
    message_model,
    shared_cores,
)
from slipstream.interconnect.profile import NetworkProfile

FEWEST_SIZES = 3
RING = SCHEMES["all_reduce"][0]


@dataclass(frozen=True)
class AllReduce:
    """How all_reduce works, and how long a message takes that was fitted to it."""

    scheme: Scheme
    message: Hockney
    #: What each number of processes said of the schemes fitted to the others; None if one number was measured.
    tested: SchemeFit | None

    def seconds(self, world: int, size: float) -> Estimate:
        return self.scheme.seconds(self.message, world, size)


def model_of(profile: NetworkProfile) -> AllReduce | str:
    """The model of all_reduce, fitted to every number of processes that was measured; or why there is none.

    Of one number alone a ring is assumed. Otherwise each in turn is held out of a fit to the others, which says what
    all_reduce follows.
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
    scheme = tested.scheme if tested and tested.scheme else RING
    message = message_model(scheme, list(chain.from_iterable(worlds)))
    if message.error > TOLERATED:
        return f"a latency and a bandwidth do not explain the all_reduce ({off(message)})"
    return AllReduce(scheme, message, tested)


def smaller_worlds(profile: NetworkProfile) -> list[int]:
    """The numbers of processes below the whole between which all_reduce was measured."""
    return sorted({m.world for m in profile.measurements if m.operation == "all_reduce"} - {profile.fingerprint.world})


def off(message: Hockney) -> str:
    return f"sizes left out of the fit are off by {message.error:.0%}"
