"""Records of one attempt: its machine, losses of time, throughput and history."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.artifacts.results.bottleneck import AttemptLosses, Bottleneck
from slipstream.artifacts.results.ledger import (
    DATA_WAIT,
    EVALUATION,
    STALL,
    STEPS,
    AttemptRecord,
    observed_in,
    summarise_goodput,
)
from slipstream.artifacts.results.training import Attempt, History, ProcessGroupFigures, Throughput, record_files
from slipstream.distributed.process_group import RankContext
from slipstream.logs import logger
from slipstream.telemetry.bottleneck import AttemptMeasurements, diagnose_training, measure_losses
from slipstream.telemetry.node import read_facts
from slipstream.telemetry.records import WAITED_FOR_PODS
from slipstream.train.data_loader import stored_blocks
from slipstream.train.data_order import GlobalOrder
from slipstream.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.train.loop.state import TrainingState
from slipstream.train.setup import ResumedTraining, Setup
from slipstream.train.telemetry.pods import read_device_series
from slipstream.train.telemetry.step_times import StepTimes, threads_of_pod
from slipstream.train.throughput import compute_throughput

LOG = logger("train")
#: Hooks that exchange gradients in two bytes per element.
HALF = ("fp16", "bf16")


def describe_machine(record: AttemptRecord, sampled: Path | None, group: RankContext) -> None:
    """Record device, pods, node and spot capacity of this attempt.

    Without a sampler, the node is the host name.
    """
    gpu = group.device.type == "cuda"
    record.device = torch.cuda.get_device_name(group.device) if gpu else "cpu"
    record.pods = max(1, group.world // int(os.environ.get("LOCAL_WORLD_SIZE", group.world)))
    facts = read_facts(sampled) if sampled else None
    record.node, record.spot = (facts.node, facts.spot) if facts else (socket.gethostname(), None)


def safe_diagnosis(attempts: Sequence[AttemptRecord]) -> Bottleneck | None:
    """Return the bottleneck diagnosis over all attempts; None if it fails, which is only logged."""
    try:
        return diagnose_training(observed_in(attempts))
    except Exception as error:
        logger("telemetry").warning(
            "bottleneck analysis failed (%s: %s); training is unaffected", type(error).__name__, error
        )
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
        overhead=setup.placed.overhead,
        pieces=len(setup.resolved.pieces),
        on_cpu=setup.group.device.type == "cpu",
        exchanged_bytes=0 if divided else bytes_each * setup.traits.trained,
        divided=divided,
        threads=threads_of_pod(),
    )
    return measure_losses(times.blocks, around)


def record_attempt(resumed: ResumedTraining) -> dict[str, bytes]:
    """Return the record files of a training that has taken its last step, by name. Collective.

    Closes the checkpoints, because no other is saved.
    """
    setup, state, checkpoints, recorder = resumed.setup, resumed.state, resumed.checkpoints, resumed.guard.recorder
    group, restored = setup.group, resumed.restored
    attempts = recorder.attempts()
    goodput, bottleneck = summarise_goodput(attempts), safe_diagnosis(attempts)
    if group.rank == 0:
        LOG.info("%s", goodput)
        if bottleneck:
            LOG.info("%s", bottleneck.sentence)
    checkpoints.close()
    attempt = Attempt(
        steps=state.progress.step - resumed.first_step,
        resumed_from=restored.source if restored else "",
        save_seconds=checkpoints.background.publish_seconds,
        ledger=goodput,
        throughput=attempt_throughput(setup, state, resumed.first_step, recorder.record),
        compiled=setup.compiled.figures if setup.compiled else None,
        bottleneck=bottleneck,
        code_versions=checkpoints.trained_by,
    )
    # All pods have uploaded their samples, because the ranks have exchanged memory figures afterwards.
    devices = read_device_series(checkpoints.home.storage, attempts) if group.rank == 0 else None
    return record_files(training_history(state, group, setup.resolved.precision), attempt, devices)


def attempt_throughput(setup: Setup, state: TrainingState, first_step: int, record: AttemptRecord) -> Throughput | None:
    """Return the throughput of this attempt's steps, including data waits and stalls."""
    training, group, data, precision = setup.training, setup.group, setup.resolved.data, setup.resolved.precision
    order = GlobalOrder(stored_blocks(data, "train"), training.batch_size, training.seed)
    return compute_throughput(
        rows=order.consumed(state.progress.step) - order.consumed(first_step),
        seconds=sum(record.seconds[name] for name in (STEPS, DATA_WAIT, STALL)),
        tokens_per_row=data.signature.inputs[0].shape[0] if data.signature.task == "next token" else 0,
        flops_per_row=state.traits.flops_per_row,
        kind="tf32" if training.tf32 and precision == "fp32" and group.device.type == "cuda" else precision,
        group=group,
    )


def training_history(state: TrainingState, group: RankContext, precision: str) -> History:
    """Return the contents of ``history.json``."""
    progress = state.progress
    assert progress.best, "training ends with an evaluation"
    return History(
        steps=progress.steps,
        evaluations=progress.evaluations,
        best=progress.best,
        steps_total=progress.step,
        stopped_early=progress.stopped_early,
        parameters=state.traits.parameters,
        trained=state.traits.trained,
        world=ProcessGroupFigures(
            size=group.world,
            backend=group.backend,
            device=group.device.type,
            precision=precision,
            threads=torch.get_num_threads(),
        ),
        skipped=progress.skipped,
        left_out=progress.left_out,
    )
