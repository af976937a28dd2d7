"""Records of one attempt: its machine, throughput and history."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.pipeline.train.setup import ResumedTraining, Setup
from slipstream.pipeline.train.telemetry.around import safe_diagnosis
from slipstream.pipeline.train.telemetry.pods import read_device_series
from slipstream.pipeline.train.throughput import compute_throughput
from slipstream.shared.artifacts.results.ledger import (
    DATA_WAIT,
    STALL,
    STEPS,
    AttemptRecord,
    summarise_goodput,
)
from slipstream.shared.artifacts.results.training import Attempt, History, ProcessGroupFigures, Throughput, record_files
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.logs import logger
from slipstream.shared.telemetry.node import read_facts

LOG = logger("train")


def describe_machine(record: AttemptRecord, sampled: Path | None, group: RankContext) -> None:
    """Record device, pods, node and spot capacity of this attempt.

    Without a sampler, the node is the host name.
    """
    gpu = group.device.type == "cuda"
    record.device = torch.cuda.get_device_name(group.device) if gpu else "cpu"
    record.pods = max(1, group.world // int(os.environ.get("LOCAL_WORLD_SIZE", group.world)))
    facts = read_facts(sampled) if sampled else None
    record.node, record.spot = (facts.node, facts.spot) if facts else (socket.gethostname(), None)


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
