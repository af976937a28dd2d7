"""Real memory of a training's processes, and their traced memory."""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.optimizer import AveragedWeights, make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits, probe_model
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.memory.trace import CPU, TracedStep, zero_batch
from slipstream.pipeline.train.parallel.compiled import recompute_blocks
from slipstream.pipeline.train.parallel.divide import divide_model
from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel
from slipstream.pipeline.train.parallel.replicas import replicate_model
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.adapters.network import hold_frozen
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.factory import build_model, initial_values
from tests.support.allocations import allocated, in_use, most_in_use
from tests.support.layout_runs import on_ranks


class Real(NamedTuple):
    """Bytes: the most in a step, and what is left after it."""

    peak: int
    lasting: int


def begun(step: TracedStep, group: RankContext) -> TrainingState:
    """A rank's state, as the engine makes it."""
    training = step.training
    model = build_model(step.model, step.signature, 0, empty=training.parallel.divides)
    if model.adapted:
        hold_frozen(model.network, training.precision)
    traits = probe_model(model, CPU) if not training.parallel.divides else ModelTraits()
    if training.recompute == "full":
        recompute_blocks(model.network)
    parallel: ParallelModel
    if training.parallel.divides:
        layout = Layout.connect(training.parallel, group.rank, group.world, CPU)
        size = {"micro_batches": step.micro_batches, "rows": step.rows}
        values = initial_values(step.model, model.network, 0, ModelOrigin(step.model))
        parallel = divide_model(model, layout, CPU, values, **size, precision=training.precision)
    else:
        parallel = replicate_model(model, traits, group, training.gradients)
    averaged = AveragedWeights(parallel.model, training.ema) if training.ema else None
    scaler = LossScaler(CPU, enabled=False)
    optimizer = make_optimizer(parallel.model, training)
    return TrainingState(parallel, optimizer, scaler, {}, Progress(), traits, averaged)


def one_rank(step: TracedStep, onednn: bool) -> Real:
    """The third step of a rank, by the profiler's allocation events, or by malloc where they do not show all."""
    group = RankContext(dist.get_rank(), dist.get_world_size(), CPU, "gloo")
    training: TrainingConfig = replace(step.training, accumulation=step.micro_batches)
    kept: list[tuple[TrainingState, RankContext]] = []
    context: AbstractContextManager[object] = nullcontext() if onednn else torch.backends.mkldnn.flags(enabled=False)

    def one_step() -> None:
        state, sharing = kept[0]
        batch = zero_batch(step.signature, step.micro_batches * step.rows, sharing)
        train_step(state, training, sharing, training.precision, batch, total_steps=3)

    def begin() -> None:
        state = begun(step, group)
        kept.append((state, state.parallel.sharing_rows(group)))
        one_step()
        one_step()

    with context:
        if group.world == 1:
            lasting = allocated(begin)[-1]
            return Real(lasting + max(allocated(one_step)), lasting)
        # What this thread makes and one of gloo's frees, copies and DDP's first buckets, the profiler shows as kept.
        begin()
        dist.barrier()
        gc.collect()
        lasting, before = live_bytes(), in_use()
        if group.world > 1 and not (training.parallel.divides or training.gradients.gradient_as_bucket_view):
            lasting += sum(x.nbytes for x in kept[0][0].parameters)  # buckets that no tensor of Python's lies in
        return Real(lasting + most_in_use(one_step) - before, lasting)


def live_bytes() -> int:
    """Of all tensors that Python knows, as it does of the views of DDP's buckets."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors if not tensor.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def many(steps: Sequence[TracedStep], warm_up: TracedStep, onednn: bool) -> list[Real]:
    """``warm_up`` makes what torch makes once in a process and layout."""
    return [one_rank(step, onednn) for step in (warm_up, *steps)][1:]


def real(steps: Sequence[TracedStep], warm_up: TracedStep, out: Path, *, onednn: bool = True) -> list[list[Real]]:
    """Of steps of equally many processes: what every rank holds in each. ``warm_up`` is a small one of that layout."""
    of_ranks = on_ranks(steps[0].world, partial(many, steps, warm_up, onednn), out)
    return [[of_rank[number] for of_rank in of_ranks] for number in range(len(steps))]
