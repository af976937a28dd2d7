"""Search for the rows that cause a non-finite loss or gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.objective import loss_sum
from slipstream.pipeline.train.loop.probe import running_statistics, unchanged_after
from slipstream.pipeline.train.loop.step import padded_rows
from slipstream.pipeline.train.parallel.model import ParallelModel
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import SkippedStep
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.arithmetic import autocast_context
from slipstream.shared.models.factory import Predictor

#: Maximum number of rows that one rank reports.
NAMED = 8


def name_rows(
    step: int,
    parallel: ParallelModel,
    data: PreparedData,
    order: GlobalOrder,
    config: TrainingConfig,
    precision: str,
    group: RankContext,
) -> SkippedStep:
    """Return the rows of step number ``step`` (from 1) that cause a non-finite loss or gradient.

    Every row is tested separately with the current weights. Only losses are tested if the model is divided among ranks.
    Collective; the result is equal on all ranks. ``group`` holds the data-parallel ranks.
    """
    start, stop = order.consumed(step - 1), order.consumed(step)
    rows = next(order.plans(group.rank, group.world, start, stop)).rows
    padded = padded_rows(-(-order.largest // group.world), config.micro_batches) if not parallel.is_whole else 0
    batches = training_batches(data, order, group, start, stop, padded=padded)
    if not parallel.is_whole:
        bad = rows_of_bad_losses(parallel, next(batches), precision, group.device)
    else:
        bad = bad_rows(parallel.model, next(batches), config, precision, group.device) if len(rows) else []
    batches.close()
    everyones: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, rows[bad].tolist())
    batch = sorted(next(order.plans(0, 1, start, stop)).rows.tolist())
    return SkippedStep(step, [row for one in everyones for row in one], batch)


@torch.no_grad()
def rows_of_bad_losses(parallel: ParallelModel, batch: Batch, precision: str, device: torch.device) -> list[int]:
    """Return the positions in ``batch`` of the first :data:`NAMED` non-finite losses.

    Collective: one forward pass in evaluation mode. If several ranks have the same rows, only one of them returns any.
    """
    was_training = parallel.model.training
    parallel.model.eval()
    with autocast_context(precision, device):
        outputs = parallel.forward(*batch.inputs)
    parallel.model.train(was_training)
    if outputs is None or not parallel.counts_losses:
        return []
    signature = parallel.model.signature
    losses = (loss_sum(signature, outputs[i : i + 1], batch.target[i : i + 1]) for i in range(batch.rows))
    return [place for place, loss in enumerate(losses) if not loss.isfinite()][:NAMED]


def bad_rows(model: Predictor, batch: Batch, config: TrainingConfig, precision: str, device: torch.device) -> list[int]:
    """Return the positions of the first :data:`NAMED` rows of ``batch`` with a non-finite loss or gradient.

    Searches by bisection, and leaves the model unchanged.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]

    def finite(rows: slice) -> bool:
        with autocast_context(precision, device):
            outputs = model(*(x[rows] for x in batch.inputs))
        weight = None if batch.weight is None else batch.weight[rows]
        loss = loss_sum(model.signature, outputs, batch.target[rows], config.label_smoothing, weight)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return all(bool(x.isfinite().all()) for x in (loss, *gradients) if x is not None)

    bad: list[int] = []
    parts = [slice(0, batch.rows)]
    with unchanged_after(model), running_statistics(model):
        while parts and len(bad) < NAMED:
            part = parts.pop()
            if finite(part):
                continue
            if part.stop - part.start == 1:
                bad.append(part.start)
            else:
                middle = (part.start + part.stop) // 2
                parts += [slice(middle, part.stop), slice(part.start, middle)]
    return bad
