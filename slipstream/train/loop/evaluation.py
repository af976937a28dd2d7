"""The evaluation on the validation split: metrics, the best weights, early stopping."""

from __future__ import annotations

import math

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.training import ValidationPoint
from slipstream.distributed.process_group import Group
from slipstream.distributed.user_errors import AgreedUserError
from slipstream.models.factory import batch_rows
from slipstream.train.checkpoint.state import capture_random_state, restore_random_state
from slipstream.train.config import TrainingConfig
from slipstream.train.data_loader import evaluation_batches
from slipstream.train.fault_tolerance.guard import Guard
from slipstream.train.loop.objective import evaluate_split
from slipstream.train.loop.state import TrainingState


def record_evaluation(
    state: TrainingState,
    data: PreparedData,
    config: TrainingConfig,
    group: Group,
    precision: str,
    epoch: float,
    guard: Guard,
) -> None:
    """Evaluate, copy the best weights, and stop early when ``patience`` is exceeded.

    Raises ``Preempted`` on all ranks when a machine is preempted meanwhile; the saved state is the one before. Raises
    ``AgreedUserError`` on all ranks if the loss is not finite.
    """
    progress, model = state.progress, state.model
    random = capture_random_state()

    def state_before() -> tuple[object, object]:
        # A user's model may draw random numbers in evaluation too; the next attempt repeats the whole evaluation.
        restore_random_state(random)
        return state.to_save(), state.rank_state()

    largest = math.ceil(sum(data.segment_rows("validation")) / group.world)
    rounds = math.ceil(largest / batch_rows(model.row_bytes))
    rows = math.ceil(largest / rounds)
    if state.parallel.batch_rows:
        rows, rounds = state.parallel.batch_rows, math.ceil(largest / state.parallel.batch_rows)
    batches = evaluation_batches(data, "validation", rows, group, padded=rows, rounds=rounds, waiting=guard.waiting)
    guarded = guard.evaluating(batches, rounds, progress.step, state_before)
    forward = state.averaged.forward if state.averaged else state.parallel.forward
    metrics = evaluate_split(model, forward, guarded, group.device, precision)
    if not math.isfinite(metrics.loss):
        raise AgreedUserError(
            f"training.learning_rate: the validation loss became {metrics.loss} by step {progress.step}; "
            f"try less than {config.learning_rate:g}, a longer training.warmup, or training.clip_norm above 0"
        )
    train_loss = progress.steps[-1].loss if progress.steps else None
    evaluation = ValidationPoint(progress.step, epoch, **vars(metrics), train_loss=train_loss)
    progress.evaluations.append(evaluation)
    if not progress.best or evaluation.loss < progress.best.loss:
        progress.best, progress.stale = evaluation, 0
        guard.wait_for_copy()
        state.update_best_weights()
    else:
        progress.stale += 1
        progress.stopped_early = 0 < config.patience <= progress.stale
