"""What this attempt knows of itself besides the times of its steps."""

from __future__ import annotations

import os

from slipstream.artifacts.results.bottleneck import Observed
from slipstream.telemetry.bottleneck import Around, observe
from slipstream.telemetry.records import WAITED_FOR_PODS
from slipstream.train.fault_tolerance.goodput import EVALUATION, STALL, GoodputRecorder
from slipstream.train.setup import Setup
from slipstream.train.telemetry.step_times import StepTimes, threads_of_pod

#: Bytes of a number of the gradient as it is exchanged, by the hook.
HALF = ("fp16", "bf16")


def observed(setup: Setup, times: StepTimes, recorder: GoodputRecorder) -> Observed | None:
    """What the attempt has observed by now; None before its first step. Called by another thread, too."""
    seconds = recorder.record.seconds
    divided = setup.training.parallel.divides
    bytes_each = 2 if setup.training.gradients.hook in HALF else 4
    around = Around(
        evaluation=seconds[EVALUATION],
        checkpoint=seconds[STALL],
        late_pods=float(os.environ.get(WAITED_FOR_PODS) or 0.0),
        two_rows=setup.two_rows,
        pieces=setup.pieces,
        on_cpu=setup.group.device.type == "cpu",
        exchanged_bytes=0 if divided else bytes_each * setup.traits.parameters,
        divided=divided,
        threads=threads_of_pod(),
    )
    return observe(times.blocks, around)
