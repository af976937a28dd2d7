"""The training loop: steps, evaluations, checkpoints and early stopping. All ranks run it in parallel."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tasks.artifacts.prepared import PreparedData
from tasks.artifacts.training_record import ValidationPoint
from tasks.distributed.agreement import AgreedUserError
from tasks.distributed.process_group import Group
from tasks.train.checkpoint import Restored
from tasks.train.checkpoint.random_state import capture_random_state, restore_random_state
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import evaluation_batches, layout, training_batches
from tasks.train.data.order import GlobalOrder
from tasks.train.loop.objective import evaluate_split
from tasks.train.loop.progress import ProgressReport
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import Progress, TrainingState, copy_weights
from tasks.train.loop.step import train_step
from tasks.train.survival.goodput import DATA_WAIT, EVALUATION, GoodputRecorder
from tasks.train.survival.guard import Guard

HISTORY_POINTS = 200
#: Rows per rank and batch. During an evaluation a preemption notice waits for one batch at most.
EVALUATION_BATCH = 1024


def train_loop(
    ddp: DistributedDataParallel,
    state: TrainingState,
    data: PreparedData,
    config: TrainingConfig,
    group: Group,
    precision: str,
    guard: Guard,
    recorder: GoodputRecorder,
) -> None:
    """Train from ``state.progress.step`` to the end of the last epoch or to early stopping.

    Raises ``AgreedUserError`` on all ranks if the loss is not finite, and ``Preempted`` when a machine is preempted.
    """
    progress = state.progress
    order = GlobalOrder(layout(data, "train"), config.batch_size, config.seed)
    total = order.steps_per_epoch * config.epochs
    evaluate_every = config.evaluate_every or order.steps_per_epoch
    log_every = max(1, total // HISTORY_POINTS)
    report = ProgressReport(total, progress.step, shown=group.rank == 0)
    start = order.consumed(progress.step)
    batches = training_batches(data, order, group.rank, group.world, group.device, start, waiting=guard.waiting)

    def evaluation_due() -> bool:
        """Whether the last step still needs its evaluation, which the previous attempt may have interrupted."""
        due = progress.step > 0 and (progress.step % evaluate_every == 0 or progress.step == total)
        return due and (not progress.evaluations or progress.evaluations[-1]["step"] < progress.step)

    while not progress.stopped_early and (progress.step < total or evaluation_due()):
        if not evaluation_due():
            batch = next(batches)
            recorder.add(DATA_WAIT, batch.wait)
            with guard.step():
                loss = train_step(ddp, state, config, group, precision, batch, total).item()
            progress.step += 1
            progress.loss_sum += loss
            progress.loss_rows += len(batch.target)
            if progress.step % log_every == 0 or progress.step == total:
                record_loss(state, config, group, progress.step / order.steps_per_epoch, total)
        if evaluation_due():
            with recorder.time(EVALUATION):
                record_evaluation(state, data, config, group, progress.step / order.steps_per_epoch, guard)
            report.evaluated(progress.step, progress.evaluations[-1])
        if progress.step == total or progress.stopped_early:
            recorder.step(progress.step)
        else:
            guard.after_step(progress.step, lambda: (checkpoint_state(state), local_loss(state)))
        report.step(progress.step)
    batches.close()
    report.close()


def record_loss(state: TrainingState, config: TrainingConfig, group: Group, epoch: float, total: int) -> None:
    """Add the mean loss since the last point to the history. Raises ``AgreedUserError`` if it is not finite."""
    progress = state.progress
    sums = torch.tensor([progress.loss_sum, progress.loss_rows], dtype=torch.float64, device=group.device)
    dist.all_reduce(sums)
    progress.loss_sum, progress.loss_rows = 0.0, 0
    loss = (sums[0] / sums[1]).item()
    if not math.isfinite(loss):
        raise AgreedUserError(
            f"training.learning_rate: the loss became {loss} by step {progress.step}; "
            f"try less than {config.learning_rate:g}, a longer training.warmup, or training.clip_norm above 0"
        )
    rate = learning_rate(progress.step - 1, total, config.learning_rate, config.warmup)
    progress.steps.append({"step": progress.step, "epoch": epoch, "loss": loss, "learning_rate": rate})


def record_evaluation(
    state: TrainingState, data: PreparedData, config: TrainingConfig, group: Group, epoch: float, guard: Guard
) -> None:
    """Evaluate on the validation split, copy the best weights, and stop early when ``patience`` is exceeded.

    Raises ``Preempted`` on all ranks when a machine is preempted meanwhile; the saved state is the one before.
    """
    progress = state.progress
    random = capture_random_state()

    def state_before() -> tuple[object, list[float]]:
        # A user's model may draw random numbers in evaluation too; the next attempt repeats the whole evaluation.
        restore_random_state(random)
        return checkpoint_state(state), local_loss(state)

    batches = evaluation_batches(
        data, "validation", EVALUATION_BATCH, group.rank, group.world, group.device, waiting=guard.waiting
    )
    rounds = math.ceil(math.ceil(sum(data.segment_rows("validation")) / group.world) / EVALUATION_BATCH)
    guarded = guard.evaluating(batches, rounds, progress.step, state_before)
    metrics = evaluate_split(state.model, guarded, group.device)
    evaluation: ValidationPoint = {"step": progress.step, "epoch": epoch, **metrics}
    if progress.steps:
        evaluation["train_loss"] = progress.steps[-1]["loss"]
    progress.evaluations.append(evaluation)
    if not progress.best or evaluation["loss"] < progress.best["loss"]:
        progress.best, progress.stale = dict(evaluation), 0
        copy_weights(state.model, state.best_weights)
    else:
        progress.stale += 1
        progress.stopped_early = 0 < config.patience <= progress.stale


def local_loss(state: TrainingState) -> list[float]:
    """The part of the state that differs between ranks: the loss since the last point of the history."""
    return [state.progress.loss_sum, state.progress.loss_rows]


def apply_restored(restored: Restored, state: TrainingState, group: Group) -> None:
    """Continue from a restored checkpoint. If the number of ranks changed, rank 0 gets the sum of all ranks' losses."""
    state.progress = Progress(**restored.progress["progress"])
    state.best_weights = restored.progress["best_weights"]
    losses = [restored.owns[group.rank]] if restored.same_world else restored.owns if group.rank == 0 else []
    state.progress.loss_sum = sum(loss[0] for loss in losses)
    state.progress.loss_rows = sum(loss[1] for loss in losses)


def checkpoint_state(state: TrainingState) -> dict[str, object]:
    """What a checkpoint holds besides model, optimiser, scaler and random generators."""
    return {
        "progress": asdict(state.progress),
        "best_weights": state.best_weights,
        "conditions": state.conditions,
    }
