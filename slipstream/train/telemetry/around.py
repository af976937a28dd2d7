"""What this attempt knows of itself besides the times of its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slipstream.artifacts.results.bottleneck import Bottleneck, Observed
from slipstream.artifacts.results.ledger import EVALUATION, STALL, AttemptRecord, observed_in
from slipstream.logs import logger
from slipstream.telemetry.bottleneck import Around, judge, observe
from slipstream.telemetry.records import WAITED_FOR_PODS
from slipstream.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.train.setup import Setup
from slipstream.train.telemetry.step_times import StepTimes, threads_of_pod

LOG = logger("telemetry")
#: Bytes of a number of the gradient as it is exchanged, by the hook.
HALF = ("fp16", "bf16")


def verdict(attempts: Sequence[AttemptRecord]) -> Bottleneck | None:
    """What held the training back, over all attempts. A diagnosis that fails must not fail what it is of."""
    try:
        return judge(observed_in(attempts))
    except Exception as error:
        LOG.warning("no verdict: %s: %s", type(error).__name__, error)
        return None


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
        exchanged_bytes=0 if divided else bytes_each * setup.traits.trained,
        divided=divided,
        threads=threads_of_pod(),
    )
    return observe(times.blocks, around)
