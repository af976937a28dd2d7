"""Pipeline parallelism with PyTorch's schedules 1F1B and interleaved 1F1B.

Sources: Narayanan et al. 2019 ("PipeDream") for 1F1B, Narayanan et al. 2021 for interleaved. All micro-batches have the
same number of rows. Short batches are padded; the caller multiplies the loss of padding by 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.parallel.layout import Layout, LossOf
from slipstream.shared.machine.torch_versions import accept_any_layout
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.plan import ParallelPlan, model_plan

T = TypeVar("T")


def cut_stages(model: Predictor, layout: Layout) -> list[Predictor]:
    """Return this process's pipeline stages, as reduced copies of the model, with blocks evenly distributed."""
    held_by = processes_of_parameters(model, layout)
    stages = []
    for stage in layout.stages:
        part = cut_stage(copy.deepcopy(model), stage, layout.all_stages)
        part.held_by = held_by
        stages.append(part)
    return stages


def cut_stage(part: Predictor, stage: int, all_stages: int) -> Predictor:
    """Reduce ``part``, a whole model, to stage number ``stage`` of ``all_stages``."""
    plan = stated_plan(part)
    blocks = len(plan.blocks)
    plan.cut(stage * blocks // all_stages, (stage + 1) * blocks // all_stages)
    part.first, part.last = stage == 0, stage == all_stages - 1
    return part


def processes_of_parameters(model: Predictor, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return, for every parameter name, the pipeline coordinates of the processes that hold it."""
    places: dict[str, set[int]] = {}
    for stage in range(layout.all_stages):
        # The copy shares tensors, since only names matter.
        part = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        for name, _ in cut_stage(part, stage, layout.all_stages).named_parameters():
            places.setdefault(name, set()).add(stage % layout.size("pipeline"))
    return {name: tuple(sorted(of)) for name, of in places.items()}


def stated_plan(model: Predictor) -> ParallelPlan:
    plan = model_plan(model.network)
    assert plan is not None, "check_plan refuses models without a plan"
    return plan


class Pipeline:
    """Pipeline schedule over this process's stages.

    A batch has ``micro_batches`` micro-batches of ``rows`` rows. In ``precision`` bf16, hidden states and their
    gradients are sent as bf16.
    """

    def __init__(
        self,
        stages: list[Predictor],
        layout: Layout,
        device: torch.device,
        micro_batches: int,
        rows: int,
        precision: str,
    ) -> None:
        assert layout.mesh is not None
        self._layout = layout
        self._stages = stages
        self._takes_ids = stated_plan(stages[0]).takes_ids
        self._loss_of: LossOf | None = None
        group = layout.mesh.get_group("pipeline")
        length, *rest = stated_plan(stages[0]).hidden
        if layout.config.tensor > 1 and layout.config.sequence:
            length //= layout.config.tensor
        dtype = next(stages[0].parameters()).dtype
        sent = torch.bfloat16 if precision == "bf16" else dtype
        for part in stages:
            if not part.last:
                # The next stage allocates buffers of this dtype; torch does not check the sent tensors.
                part.register_forward_hook(lambda module, model_inputs, outputs: outputs.to(sent))
        model_inputs = tuple(zero_inputs(stages[0].signature, rows, "meta"))
        hidden = torch.empty(rows, length, *rest, dtype=sent, device="meta", requires_grad=True)
        shape = stages[0].signature.output_shape
        outputs = torch.empty(rows, *shape, dtype=dtype, device="meta", requires_grad=True)
        last = layout.all_stages - 1
        pipeline_stages: list[_PipelineStageBase] = [
            PipelineStage(
                part,
                number,
                layout.all_stages,
                device,
                input_args=model_inputs if number == 0 else hidden,
                output_args=outputs if number == last else hidden,
                group=group,
            )
            for number, part in zip(layout.stages, stages, strict=True)
        ]
        for stage in pipeline_stages:
            accept_any_layout(stage)
        # The caller has already scaled its losses, which are sums.
        self._schedule = (
            ScheduleInterleaved1F1B(pipeline_stages, micro_batches, loss_fn=self._loss, scale_grads=False)
            if layout.config.schedule == "interleaved"
            else Schedule1F1B(pipeline_stages[0], micro_batches, loss_fn=self._loss, scale_grads=False)
        )
        #: Number of rows that every batch must have.
        self.rows = micro_batches * rows
        self._shared = shared_parameters(stages, layout)

    def step(self, inputs: Sequence[Tensor], loss_of: LossOf, documents: Tensor | None = None) -> None:
        """Run all forward and backward passes of a batch, and accumulate gradients."""
        self._loss_of = loss_of
        self._run(self._schedule.step, inputs, documents, return_outputs=False)
        self._add_shared()

    @torch.no_grad()
    def outputs(self, inputs: Sequence[Tensor], documents: Tensor | None = None) -> Tensor | None:
        """Return the outputs of a batch on the last stage; None on other stages."""
        self._loss_of = lambda outputs, _: outputs.new_zeros(())
        return self._run(self._schedule.eval, inputs, documents)

    def _run(self, run: Callable[..., T], inputs: Sequence[Tensor], documents: Tensor | None, **settings: bool) -> T:
        assert len(inputs[0]) == self.rows, "pipelines take batches of one size only"
        # The target identifies the rows for the loss.
        target = torch.arange(self.rows) if self._layout.has_losses else None
        # The schedule cuts all of them along the first dimension, so every micro-batch gets its row of documents.
        beside = {"ids": inputs[0]} if self._takes_ids else {}
        beside |= {} if documents is None else {"documents": documents}
        return run(*inputs if 0 in self._layout.stages else (), target=target, **beside, **settings)

    def _loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        assert self._loss_of is not None
        # ``rows`` is a view of arange, so its offset is the first row; a value could not be read while tracing.
        return self._loss_of(outputs, int(rows.storage_offset()))

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters of this process that an earlier pipeline process also holds."""
        return [one.parameter for one in self._shared if not one.first]

    def _add_shared(self) -> None:
        """Sum the gradients of parameters shared between stages."""
        for one in self._shared:
            assert one.parameter.grad is not None
            dist.all_reduce(local_tensor(one.parameter.grad), group=one.group)


class SharedParameter(NamedTuple):
    """Parameter held by several pipeline processes, such as a tied embedding; ``first`` is True on the earliest."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    first: bool


def shared_parameters(stages: list[Predictor], layout: Layout) -> list[SharedParameter]:
    """Return the trained parameters that these stages share with other processes. Collective."""
    assert layout.mesh is not None
    mine = {name: parameter for part in stages for name, parameter in part.named_parameters()}
    shared = []
    for name, places in sorted(stages[0].held_by.items()):
        if len(places) == 1:
            continue
        # Every rank takes part in creating every group.
        for column in layout.mesh.mesh.flatten(1).T.tolist():
            group = dist.new_group([column[place] for place in places])
            if layout.rank in column and name in mine and mine[name].requires_grad:
                shared.append(SharedParameter(mine[name], group, places[0] == layout.coordinate("pipeline")))
    return shared
