"""Records of one attempt: its machine, throughput and history."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.device_clock import DeviceClock, compute_throughput
from slipstream.pipeline.train.loop.goal import ValidationGoal
from slipstream.pipeline.train.loop.probe import ROWS, unchanged_after
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.pipeline.train.parallel.layout import Forward
from slipstream.pipeline.train.setup import ResumedTraining, Setup
from slipstream.pipeline.train.telemetry.pods import read_device_series
from slipstream.pipeline.train.telemetry.totals import safe_diagnosis
from slipstream.shared.artifacts.results.ledger import (
    DATA_WAIT,
    STALL,
    STEPS,
    AttemptRecord,
    summarise_goodput,
)
from slipstream.shared.artifacts.results.training import Attempt, History, ProcessGroupFigures, Throughput, record_files
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning
from slipstream.shared.errors import Interrupted
from slipstream.shared.logs import logger
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.telemetry.node import read_facts

LOG = logger("train")


def describe_machine(record: AttemptRecord, sampled: Path | None, group: RankContext) -> None:
    """Record device, pods, node, spot capacity and start of the pod of this attempt.

    Without a sampler, the node is the host name.
    """
    gpu = group.device.type == "cuda"
    record.device = torch.cuda.get_device_name(group.device) if gpu else "cpu"
    record.pods = max(1, group.world // int(os.environ.get("LOCAL_WORLD_SIZE", group.world)))
    facts = read_facts(sampled) if sampled else None
    record.before = max(0.0, record.began_at - facts.started_at) if facts else 0.0
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
        if bottleneck and (bottleneck.gain == 1 or bottleneck.pays):
            LOG.info("%s", bottleneck.sentence)
    checkpoints.close()
    attempt = Attempt(
        steps=state.progress.step - resumed.first_step,
        resumed_from=restored.source if restored else "",
        save_seconds=checkpoints.background.publish_seconds,
        ledger=goodput,
        throughput=attempt_throughput(setup, state, resumed.first_step, recorder.record),
        compiled=setup.compiled.figures_at_end() if setup.compiled else None,
        bottleneck=bottleneck,
        code_versions=checkpoints.trained_by,
        device=recorder.record.device,
    )
    # All pods have uploaded their samples, because the ranks have exchanged memory figures afterwards.
    devices = read_device_series(checkpoints.home.storage, attempts) if group.rank == 0 else None
    goal = ValidationGoal.of(setup.training, state.model.signature)
    return record_files(training_history(state, group, setup.resolved.precision, goal), attempt, devices)


def attempt_throughput(setup: Setup, state: TrainingState, first_step: int, record: AttemptRecord) -> Throughput | None:
    """Return the throughput of this attempt's steps, including data waits and stalls."""
    training, group, data, precision = setup.training, setup.group, setup.resolved.data, setup.resolved.precision
    order = GlobalOrder(stored_blocks(data, "train"), training.rows_per_step, training.seed)
    return compute_throughput(
        rows=order.consumed(state.progress.step) - order.consumed(first_step),
        seconds=sum(record.seconds[name] for name in (STEPS, DATA_WAIT, STALL)),
        tokens_per_row=data.signature.inputs[0].shape[0] if data.signature.task == "next token" else 0,
        flops_per_row=state.traits.flops_per_row,
        kind="tf32" if training.tf32 and precision == "fp32" and group.device.type == "cuda" else precision,
        group=group,
    )


def training_history(state: TrainingState, group: RankContext, precision: str, goal: ValidationGoal) -> History:
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
        **vars(goal),
    )


#: Number of timed passes for each of both sizes; the fastest counts.
PASSES = 5
#: Duration in seconds of a pass that is long enough to measure; larger sizes are not tried.
LONG_ENOUGH = 0.5


def overhead_seconds(
    model: Predictor, forward: Forward, clock: DeviceClock, rows: int, *, on_cpu: bool, has_batch_statistics: bool
) -> float:
    """Return the seconds of a forward and backward pass that do not depend on its rows.

    If t(r) is the time for r rows, they are 2·t(r/2) - t(r); r is at most ``rows``, the size of a micro-batch. A single
    row of tokens is halved in length. The result is 0 if it is within the noise of repeated passes, or if it cannot be
    measured: too little memory, a row that cannot be halved, or halves too small for batch statistics.

    The model is restored.
    """

    def seconds(batch: Sequence[Tensor]) -> float:
        model.zero_grad(set_to_none=True)
        began, cpu = clock.mark(), time.thread_time()
        with forward():
            outputs = model(*batch)
        outputs.sum().backward()
        used, ended = time.thread_time() - cpu, clock.mark()
        first = began.wait()
        return used if on_cpu else ended.wait() - first

    device = next(model.parameters()).device
    with unchanged_after(model):
        try:
            if rows > 1:
                least = ROWS if has_batch_statistics else 1
                halves = halvings(rows // 2, least)
                return of_sizes(lambda number: seconds(zero_inputs(model.signature, number, device)), halves)
            if model.signature.task == "next token" and not has_batch_statistics:
                (tokens,) = zero_inputs(model.signature, 1, device)
                halves = halvings(tokens.shape[1] // 2, 1)[-1:]
                return of_sizes(lambda length: seconds([tokens[:, :length]]), halves)
        except Interrupted:
            raise
        except Exception as error:
            # A model may require the full length. Lack of memory is handled when a training step runs out of it.
            if rows > 1 and error_meaning(error) is not ErrorMeaning.MEMORY:
                raise
    return 0.0


def halvings(largest: int, least: int) -> list[int]:
    """Return ``largest``, its half, its quarter and so on, not below ``least``, in ascending order."""
    sizes = []
    while largest >= least:
        sizes.append(largest)
        largest //= 2
    return sizes[::-1]


def of_sizes(seconds: Callable[[int], float], halves: Sequence[int]) -> float:
    """Return the overhead from passes of a size in ``halves`` and of twice that size; 0 if ``halves`` is empty.

    The size is the first for which a pass is long enough, else the largest. ``seconds`` times a pass of a given size.
    """
    if not halves:
        return 0.0
    seconds(halves[0])  # allocates memory and selects kernels
    for half in halves:
        if seconds(2 * half) >= LONG_ENOUGH:
            break
    timed = [(seconds(half), seconds(2 * half)) for _ in range(PASSES)]
    return beyond_noise([each for each, _ in timed], [each for _, each in timed])


def beyond_noise(halves: Sequence[float], wholes: Sequence[float]) -> float:
    """Return the overhead from repeated timings of half and whole passes; 0 if it is within their noise."""
    overhead = 2 * min(halves) - min(wholes)
    noise = 2 * (statistics.median(halves) - min(halves)) + statistics.median(wholes) - min(wholes)
    return overhead if overhead > noise else 0.0
