"""Predictions from a profile as text, for other operations and more ranks.

They follow from the scheme of all_reduce and its message time, both fitted to the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from slipstream.shared.interconnect.model.hockney import Compute, Hockney, TimeEstimate, predict_step_time
from slipstream.shared.interconnect.model.schemes import (
    SCHEMES,
    TOLERATED,
    Scheme,
    SchemeFit,
    evaluate_schemes,
    evaluate_schemes_by_world,
    message_model,
    shared_cores,
)
from slipstream.shared.interconnect.profile import ModelPoint, NetworkProfile

FEWEST_SIZES = 3
RING = SCHEMES["all_reduce"][0]


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
    scheme = tested.scheme if tested and tested.scheme else RING
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
        if reason := shared_cores(profile, world):
            yield f"{reason}: no prediction"
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
        if reason := shared_cores(profile, world):
            yield f"{reason}: no prediction"
            return
        expected = predict_step_time(compute, partial(model.seconds, world))
        share = expected.efficiency
        yield (
            f"a step between {world} ranks: {expected.step.milliseconds} expected; computation takes "
            f"{share.seconds:.0%} ({share.low:.0%} to {share.high:.0%}) of it"
        )
