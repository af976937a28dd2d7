"""Evaluation on the validation split: metrics, best weights, early stopping."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from slipstream.pipeline.train.checkpoint.state import capture_random_state, restore_random_state
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import evaluation_batches
from slipstream.pipeline.train.documents import document_layout, kernel_takes_documents
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.loop.goal import ValidationGoal
from slipstream.pipeline.train.loop.objective import evaluate_split
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.pipeline.train.loop.step import micro_batches
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import FEW_STEPS, ValidationPoint
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import AgreedUserError
from slipstream.shared.models.factory import batch_rows

#: Fraction of a GPU's free memory that outputs of a batch may take. Losses, gathered weights and fragmentation need
#: the remainder.
SHARE = 0.5


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a GPU; 0 for a CPU, whose memory is shared."""
    if device.type != "cuda":
        return 0
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def fitting_rows(row_bytes: int, free: int, before: int) -> int:
    """Return the number of rows of an evaluation batch with ``row_bytes`` of outputs per row.

    It is a power of two and at least :func:`batch_rows` of ``row_bytes``. A
    resumed run keeps its number ``before`` if it fits in ``free`` bytes, so that its sums stay bit-identical.
    """
    least = batch_rows(row_bytes)
    if before and before * row_bytes <= max(free, least * row_bytes):
        return before
    most = batch_rows(row_bytes, int(SHARE * free))
    return max(least, 1 << most.bit_length() - 1)


def agree_on_rows(state: TrainingState, device: torch.device) -> None:
    """Set the rows of an evaluation batch to the minimum that any rank can hold.

    Collective. Call it between steps, when as much memory is allocated as during an evaluation.
    """
    rows = fitting_rows(state.model.row_bytes, free_bytes(device), state.progress.evaluation_rows)
    agreed = torch.full((), rows, dtype=torch.int64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    state.progress.evaluation_rows = int(agreed)


def record_evaluation(
    state: TrainingState,
    data: PreparedData,
    config: TrainingConfig,
    group: RankContext,
    precision: str,
    epoch: float,
    guard: Guard,
) -> None:
    """Evaluate, copy the weights if they are the best so far, and stop early when ``patience`` is exhausted.

    Raises ``Preempted`` on all ranks if a machine is preempted; a checkpoint then holds the state before the
    evaluation. Raises ``AgreedUserError`` on all ranks if the loss is not finite.
    """
    progress, model = state.progress, state.model
    agree_on_rows(state, group.device)
    random = capture_random_state()

    def state_before() -> tuple[object, object]:
        # A user's model may draw random numbers in evaluation too; the next attempt repeats the whole evaluation.
        restore_random_state(random)
        return state.to_save(), state.rank_state()

    largest = math.ceil(sum(data.segment_rows("validation")) / group.world)
    rounds = math.ceil(largest / progress.evaluation_rows)
    rows = math.ceil(largest / rounds)
    if state.parallel.batch_rows:
        rows, rounds = state.parallel.batch_rows, math.ceil(largest / state.parallel.batch_rows)
    pieces = len(micro_batches(rows, config.micro_batches)) if state.parallel.batch_rows else 1
    kernel = kernel_takes_documents(group.device, precision)
    layout = document_layout(state.parallel.model_parts[0], rows // pieces, pieces, kernel=kernel)
    batches = evaluation_batches(
        data, "validation", rows, group, padded=rows, rounds=rounds, waiting=guard.waiting, documents=layout
    )
    guarded = guard.evaluating(batches, rounds, progress.step, state_before)
    forward = state.averaged.forward if state.averaged else state.parallel.forward
    goal = ValidationGoal.of(config, model.signature)
    metrics = evaluate_split(model, forward, guarded, group.device, precision, goal)
    if not math.isfinite(metrics.loss):
        raise AgreedUserError(
            f"training.learning_rate: the validation loss became {metrics.loss} by step {progress.step}; "
            f"try less than {config.learning_rate:g}, a longer training.warmup, or training.clip_norm above 0"
        )
    train_loss = progress.steps[-1].loss if progress.steps else None
    evaluation = ValidationPoint(progress.step, epoch, **vars(metrics), train_loss=train_loss)
    progress.evaluations.append(evaluation)
    if not progress.best or evaluation.cost(goal.metric) < progress.best.cost(goal.metric):
        progress.best, progress.stale = evaluation, 0
        guard.wait_for_copy()
        guard.copy(state.stage_best_weights())
    elif progress.step >= FEW_STEPS:
        progress.stale += 1
        progress.stopped_early = 0 < config.patience <= progress.stale and epoch < config.epochs
