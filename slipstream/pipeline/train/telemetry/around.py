"""Observations for the bottleneck diagnosis, in addition to step times."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.setup import Setup
from slipstream.pipeline.train.telemetry.step_times import StepTimes, threads_of_pod
from slipstream.shared.artifacts.results.devices import AttemptLosses, Bottleneck
from slipstream.shared.artifacts.results.ledger import EVALUATION, STALL, AttemptRecord, observed_in
from slipstream.shared.logs import logger
from slipstream.shared.telemetry.bottleneck import AttemptMeasurements, diagnose_training, measure_losses
from slipstream.shared.telemetry.records import WAITED_FOR_PODS

LOG = logger("telemetry")
#: Hooks that exchange gradients in two bytes per element.
HALF = ("fp16", "bf16")


def safe_diagnosis(attempts: Sequence[AttemptRecord]) -> Bottleneck | None:
    """Return the bottleneck diagnosis over all attempts; None if it fails, which is only logged."""
    try:
        return diagnose_training(observed_in(attempts))
    except Exception as error:
        LOG.warning("bottleneck analysis failed (%s: %s); training is unaffected", type(error).__name__, error)
        return None


def current_losses(setup: Setup, times: StepTimes, recorder: GoodputRecorder) -> AttemptLosses | None:
    """Return the observations so far; None before the first step. Other threads may call this."""
    seconds = recorder.record.seconds
    divided = setup.training.parallel.divides
    bytes_each = 2 if setup.training.gradients.hook in HALF else 4
    around = AttemptMeasurements(
        evaluation=seconds[EVALUATION],
        checkpoint=seconds[STALL],
        late_pods=float(os.environ.get(WAITED_FOR_PODS) or 0.0),
        overhead=setup.overhead,
        pieces=len(setup.resolved.pieces),
        on_cpu=setup.group.device.type == "cpu",
        exchanged_bytes=0 if divided else bytes_each * setup.traits.trained,
        divided=divided,
        threads=threads_of_pod(),
    )
    return measure_losses(times.blocks, around)
