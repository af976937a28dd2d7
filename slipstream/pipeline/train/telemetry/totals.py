"""Totals of this rank for the telemetry sampler, and its losses of time for the bottleneck diagnosis."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.periodically import call_periodically
from slipstream.pipeline.train.setup import Setup
from slipstream.pipeline.train.telemetry.step_times import StepTimes, threads_of_pod
from slipstream.shared.artifacts.results import ledger
from slipstream.shared.artifacts.results.devices import AttemptLosses, Bottleneck
from slipstream.shared.artifacts.results.ledger import AttemptRecord
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.logs import logger
from slipstream.shared.telemetry.bottleneck import AttemptMeasurements, diagnose_training, measure_losses
from slipstream.shared.telemetry.records import CHECKPOINT, EVALUATION, WAITED_FOR_PODS, RankTotals
from slipstream.shared.telemetry.totals import steps_file, write_totals

PERIOD_S = 1.0


@contextmanager
def written_totals(
    sampled: Path | None, times: StepTimes, recorder: GoodputRecorder, group: RankContext
) -> Iterator[None]:
    """Write this rank's totals below ``sampled`` during the block and at its end; nothing if it is None."""
    if sampled is None:
        yield
        return
    uuid = gpu_uuid(group.device)
    with suppress(OSError):
        times.done = shared_steps(steps_file(sampled, group.rank), times.done)

    def write() -> None:
        write_totals(sampled, totals_of(times, recorder, group.rank, uuid))

    with call_periodically(write, PERIOD_S, PERIOD_S, "totals", "the totals of this rank could not be written"):
        yield


def shared_steps(path: Path, done: np.ndarray) -> np.ndarray:
    """Return ``done`` in a file that the sampler reads at every scrape, so that ranks in lockstep show equal steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = np.memmap(path, done.dtype, "w+", shape=done.shape)
    shared[:] = done
    return shared


def totals_of(times: StepTimes, recorder: GoodputRecorder, rank: int, uuid: str) -> RankTotals:
    """Return the totals of a rank; on rank 0 also goodput and every bottleneck's fraction of time."""
    record, seconds = recorder.record, recorder.record.seconds
    share, causes = None, {}
    if rank == 0:
        share = recorder.goodput()
        if found := diagnose_training(ledger.observed_in([record])):
            causes = found.shares
    phases = {**times.phases, EVALUATION: seconds[ledger.EVALUATION], CHECKPOINT: seconds[ledger.STALL]}
    return RankTotals(
        rank=rank,
        gpu_uuid=uuid,
        steps=times.steps,
        samples=times.samples,
        phase_seconds=phases,
        steps_within=list(times.within),
        last_step_at=time.time() - (time.perf_counter() - times.last_step) if times.last_step else 0.0,
        goodput=share,
        bottlenecks=causes,
        attempt=recorder.record.attempt,
    )


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID as NVML spells it; "" on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


LOG = logger("telemetry")
#: Hooks that exchange gradients in two bytes per element.
HALF = ("fp16", "bf16")


def safe_diagnosis(attempts: Sequence[AttemptRecord]) -> Bottleneck | None:
    """Return the bottleneck diagnosis over all attempts; None if it fails, which is only logged."""
    try:
        return diagnose_training(ledger.observed_in(attempts))
    except Exception as error:
        LOG.warning("bottleneck analysis failed (%s: %s); training is unaffected", type(error).__name__, error)
        return None


def current_losses(setup: Setup, times: StepTimes, recorder: GoodputRecorder) -> AttemptLosses | None:
    """Return the observations so far; None before the first step. Other threads may call this."""
    seconds = recorder.record.seconds
    divided = setup.training.parallel.divides
    bytes_each = 2 if setup.training.gradients.hook in HALF else 4
    around = AttemptMeasurements(
        evaluation=seconds[ledger.EVALUATION],
        checkpoint=seconds[ledger.STALL],
        late_pods=float(os.environ.get(WAITED_FOR_PODS) or 0.0),
        overhead=setup.overhead,
        pieces=len(setup.resolved.pieces),
        on_cpu=setup.group.device.type == "cpu",
        exchanged_bytes=0 if divided else bytes_each * setup.traits.trained,
        divided=divided,
        threads=threads_of_pod(),
    )
    return measure_losses(times.blocks, around)
