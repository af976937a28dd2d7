"""What the model says about a profile, in lines to read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tasks.artifacts.network_profile import Fitted, NetworkProfile
from tasks.collectives.model.hockney import Hockney
from tasks.collectives.model.schemes import SCHEMES, TOLERATED, judge, message_model, shared_cores
from tasks.collectives.model.step_time import Compute, predict

FEWEST_SIZES = 3
CURVE_POINTS = 60
NO_STEPS = "steps between more ranks are not predicted"
RING = SCHEMES["all_reduce"][0]


def lines(profile: NetworkProfile) -> Iterator[str]:
    """The messages of the all_reduce, what each operation follows, and the all_reduce between more ranks."""
    here = profile.fingerprint.world
    if reason := shared_cores(profile, here):
        yield reason
        return
    message = message_of(profile)
    if message is None:
        return
    off = f"sizes left out of the fit are off by {message.error:.0%}"
    if message.error > TOLERATED:
        yield f"a latency and a bandwidth do not explain the all_reduce ({off}): no prediction"
        return
    breaks = "".join(f", another from {int(size)} bytes" for size in message.breaks)
    yield (
        f"a message takes {message.latency * 1e6:.0f} us and its bytes at {message.bandwidth / 1e9:.3g} GB/s{breaks}, "
        f"if all_reduce is a ring ({off})"
    )
    for name in dict.fromkeys(m.operation for m in profile.measurements):
        if name in SCHEMES and name != "all_reduce":
            yield str(judge(name, message, profile.of(name)[-1:]))
    size = profile.of("all_reduce")[-1].bytes
    for world in (2 * here, 4 * here):
        if reason := shared_cores(profile, world):
            yield reason
            return
        expected = RING.seconds(message, world, size)
        yield f"all_reduce of {size} bytes between {world} ranks: {expected.milliseconds} expected, on a like network"


def fitted(profile: NetworkProfile) -> list[Fitted]:
    """The model of all_reduce between its smallest and its largest size; empty where it explains nothing."""
    message = message_of(profile)
    if message is None or message.error > TOLERATED or shared_cores(profile, profile.fingerprint.world):
        return []
    measured, world = profile.of("all_reduce"), profile.fingerprint.world
    sizes = np.geomspace(measured[0].bytes, measured[-1].bytes, CURVE_POINTS).round().astype(int).tolist()
    estimates = [(size, RING.seconds(message, world, size)) for size in sizes]
    return [Fitted(bytes=size, seconds=e.seconds, low=e.low, high=e.high) for size, e in estimates]


def step_lines(profile: NetworkProfile | None, compute: Compute) -> Iterator[str]:
    """The steps of a model whose computation was measured, between these and more ranks; or why they are not predicted.
    ``profile`` is None if there is none of this hardware."""
    if profile is None:
        yield f"{NO_STEPS}: the history has no profile of this hardware; run the benchmark first"
        return
    here, message = profile.fingerprint.world, message_of(profile)
    if message is None:
        why = "a single process has no link" if here < 2 else f"the last profile has under {FEWEST_SIZES} sizes of it"
        yield f"{NO_STEPS}: they take a model of all_reduce, and {why}"
        return
    if message.error > TOLERATED:
        yield f"{NO_STEPS}: a latency and a bandwidth do not explain the all_reduce of the last profile"
        return
    for world in (here, 2 * here, 4 * here):
        if reason := shared_cores(profile, world):
            yield reason
            return
        expected = predict(compute, partial(RING.seconds, message, world))
        share = expected.efficiency
        yield (
            f"a step between {world} ranks: {expected.step.milliseconds} expected, of which computation is "
            f"{share.seconds:.0%} ({share.low:.0%} to {share.high:.0%})"
        )


def message_of(profile: NetworkProfile) -> Hockney | None:
    """The model of a message if all_reduce is a ring; None if there are too few sizes, or no network."""
    measured = profile.of("all_reduce")
    if len(measured) < FEWEST_SIZES or profile.fingerprint.world < 2:
        return None
    return message_model(RING, measured)
