"""The training loop: steps, evaluations, checkpoints, and when to stop. All ranks run it side by side."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tasks.artifacts.prepared import PreparedData
from tasks.distributed.agreement import AgreedRefusal
from tasks.distributed.process_group import Group
from tasks.train.checkpoint import Restored
from tasks.train.checkpoint.random_state import capture, put_back
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import evaluation_batches, layout, training_batches
from tasks.train.data.order import GlobalOrder
from tasks.train.loop.objective import evaluate_split
from tasks.train.loop.progress import ProgressReport
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import Progress, TrainingState, copy_of_weights
from tasks.train.loop.step import train_step
from tasks.train.survival.goodput import DATA_WAIT, EVALUATION, Ledger
from tasks.train.survival.guard import Guard

HISTORY_POINTS = 200
#: Rows per rank; a notice waits for no more than one such batch.
EVALUATION_BATCH = 1024


def train_loop(
    ddp: DistributedDataParallel,
    state: TrainingState,
    data: PreparedData,
    config: TrainingConfig,
    group: Group,
    precision: str,
    guard: Guard,
    ledger: Ledger,
) -> None:
    """Train from ``state.progress.step`` on, until the last epoch or until early stopping.

    Raises ``AgreedRefusal`` on all ranks when the loss is no longer a finite number, and ``Preempted`` on all when a
    machine is taken away.
    """
    progress = state.progress
    order = GlobalOrder(layout(data, "train"), config.batch_size, config.seed)
    total = order.steps_per_epoch * config.epochs
    evaluate_every = config.evaluate_every or order.steps_per_epoch
    log_every = max(1, total // HISTORY_POINTS)
    shown = ProgressReport(total, progress.step, shown=group.rank == 0)
    start = order.consumed(progress.step)
    batches = training_batches(data, order, group.rank, group.world, group.device, start, waiting=guard.waiting)

    def owes_evaluation() -> bool:
        """Whether the last step asks for an evaluation: also when the attempt before left in the midst of it."""
        due = progress.step > 0 and (progress.step % evaluate_every == 0 or progress.step == total)
        return due and (not progress.evaluations or progress.evaluations[-1]["step"] < progress.step)

    while not progress.stopped_early and (progress.step < total or owes_evaluation()):
        if not owes_evaluation():
            batch = next(batches)
            ledger.add(DATA_WAIT, batch.wait)
            with guard.step():
                loss = train_step(ddp, state, config, group, precision, batch, total).item()
            progress.step += 1
            progress.loss_sum += loss
            progress.loss_rows += len(batch.target)
            if progress.step % log_every == 0 or progress.step == total:
                record_loss(state, config, group, progress.step / order.steps_per_epoch, total)
        if owes_evaluation():
            with ledger.time(EVALUATION):
                record_evaluation(state, data, config, group, progress.step / order.steps_per_epoch, guard)
            shown.evaluated(progress.step, progress.evaluations[-1])
        if progress.step == total or progress.stopped_early:
            ledger.step(progress.step)
        else:
            guard.after_step(progress.step, lambda: (to_save(state), loss_share(state)))
        shown.step(progress.step)
    batches.close()
    shown.close()


def record_loss(state: TrainingState, config: TrainingConfig, group: Group, epoch: float, total: int) -> None:
    """Add the mean training loss since the last point to the history; refuse one that is not finite."""
    progress = state.progress
    sums = torch.tensor([progress.loss_sum, progress.loss_rows], dtype=torch.float64, device=group.device)
    dist.all_reduce(sums)
    progress.loss_sum, progress.loss_rows = 0.0, 0
    loss = (sums[0] / sums[1]).item()
    if not math.isfinite(loss):
        raise AgreedRefusal(
            f"training.learning_rate: the loss became {loss} by step {progress.step}; "
            f"try less than {config.learning_rate:g}, a longer training.warmup, or training.clip_norm above 0"
        )
    rate = learning_rate(progress.step - 1, total, config.learning_rate, config.warmup)
    progress.steps.append({"step": progress.step, "epoch": epoch, "loss": loss, "learning_rate": rate})


def record_evaluation(
    state: TrainingState, data: PreparedData, config: TrainingConfig, group: Group, epoch: float, guard: Guard
) -> None:
    """Evaluate on the validation split, keep the best weights, and stop early when ``patience`` is spent.

    Raises ``Preempted`` on all ranks when a machine goes meanwhile; the state is then that of before.
    """
    progress = state.progress
    random = capture()

    def broken_off() -> tuple[object, list[float]]:
        # A user's model may draw random numbers here too; the next attempt has to find those that were there.
        put_back(random)
        return to_save(state), loss_share(state)

    batches = evaluation_batches(
        data, "validation", EVALUATION_BATCH, group.rank, group.world, group.device, waiting=guard.waiting
    )
    rounds = math.ceil(math.ceil(sum(data.segment_rows("validation")) / group.world) / EVALUATION_BATCH)
    watched = guard.evaluating(batches, rounds, progress.step, broken_off)
    evaluation = {"step": progress.step, "epoch": epoch, **evaluate_split(state.model, watched, group.device)}
    if progress.steps:
        evaluation["train_loss"] = progress.steps[-1]["loss"]
    progress.evaluations.append(evaluation)
    if not progress.best or evaluation["loss"] < progress.best["loss"]:
        progress.best, progress.stale = evaluation, 0
        copy_of_weights(state.model, state.best_weights)
    else:
        progress.stale += 1
        progress.stopped_early = 0 < config.patience <= progress.stale


def loss_share(state: TrainingState) -> list[float]:
    """What this rank alone knows: its share of the loss since the last point of the history."""
    return [state.progress.loss_sum, state.progress.loss_rows]


def take_up(restored: Restored, state: TrainingState, group: Group) -> None:
    """Go on from a restored checkpoint. In another world rank 0 takes up what all ranks' shares came to."""
    state.progress = Progress(**restored.progress["progress"])
    state.best_weights = restored.progress["best_weights"]
    shares = [restored.owns[group.rank]] if restored.same_world else restored.owns if group.rank == 0 else []
    state.progress.loss_sum = sum(share[0] for share in shares)
    state.progress.loss_rows = sum(share[1] for share in shares)


def to_save(state: TrainingState) -> dict[str, object]:
    """What a checkpoint keeps beside model, optimiser, scaler and random generators."""
    return {
        "progress": asdict(state.progress),
        "best_weights": state.best_weights,
        "conditions": state.conditions,
    }
