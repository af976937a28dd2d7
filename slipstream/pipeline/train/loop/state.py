"""Training state that a checkpoint saves and a resumed run continues from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.pipeline.train.checkpoint.manager import RestoredCheckpoint
from slipstream.pipeline.train.checkpoint.staging import changed_later, host_buffers, stage_copies, with_placement_of
from slipstream.pipeline.train.checkpoint.state import AppState, StateDict, Stateful, own_state
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.objective import Teacher
from slipstream.pipeline.train.loop.optimizer import AveragedWeights, GradientCheck
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.parallel.layout import ParallelModel
from slipstream.shared.artifacts.records import from_tree, to_tree
from slipstream.shared.artifacts.results.training import LossPoint, RollbackRange, SkippedStep, ValidationPoint
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.arithmetic import tf32_allowed
from slipstream.shared.models.factory import Predictor

#: Defaults of torch's GradScaler.
FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000
#: Outcomes of a step: weights updated; skipped; skipped, possibly because the loss scale was too large.
USED, SKIPPED, RESCALED = 0, 1, 2


@contextmanager
def kernels_configured(config: TrainingConfig) -> Iterator[None]:
    """Set deterministic and TF32 kernels as configured, and restore the former settings on exit.

    TF32 applies to both matmuls and convolutions. Enter the context before anything runs on a GPU.
    """
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Filling uninitialised memory costs time, and only helps to find reads of it.
    fill: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    allowed = cudnn.benchmark, fill.fill_uninitialized_memory
    if config.deterministic:
        # cuBLAS sums in a fixed order only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The benchmark selects the fastest algorithm per shape, which may differ between runs.
    cudnn.benchmark = not config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    fill.fill_uninitialized_memory = False
    try:
        with tf32_allowed(config.tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cudnn.benchmark, fill.fill_uninitialized_memory = allowed


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) for fp16; with ``enabled`` False the scale is 1.

    Unlike torch's GradScaler it takes the check of the gradients from :class:`GradientCheck`, and never makes the host
    wait. Its state has GradScaler's keys.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), FIRST_SCALE if enabled else 1.0, device=device)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, factor: float) -> Tensor | float:
        """Return ``factor`` times the scale."""
        return self.scale * factor if self.enabled else factor

    def outcome(self, verdict: GradientCheck) -> Tensor:
        """Return the outcome of a step, a scalar: :data:`USED`, :data:`SKIPPED` or :data:`RESCALED`."""
        return verdict.skip * (SKIPPED + (self.scale > 1)) if self.enabled else verdict.skip

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients of ``parameters`` by the scale, in place."""
        if not self.enabled:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self.scale.double().reciprocal().float())

    @torch.no_grad()
    def update(self, verdict: GradientCheck) -> None:
        """Halve the scale after a skipped step; double it after :data:`STEPS_TO_GROW` used steps."""
        if not self.enabled:
            return
        skip = verdict.skip.bool()
        self._steps.copy_(torch.where(skip, 0, self._steps + 1))
        grows = self._steps == STEPS_TO_GROW
        self.scale.copy_(torch.where(skip, self.scale / 2, torch.where(grows, self.scale * 2, self.scale)))
        self._steps.masked_fill_(grows, 0)

    def state_dict(self) -> StateDict:
        if not self.enabled:
            return {}
        return {"scale": self.scale.item(), "_growth_tracker": int(self._steps.item())}

    def load_state_dict(self, state: StateDict) -> None:
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._steps.fill_(state["_growth_tracker"])


@dataclass
class Progress:
    """Progress of training; it holds no times, so equal runs have equal progress.

    ``step`` counts optimiser steps: applied, skipped for non-finite values, or omitted by a rollback.
    """

    step: int = 0
    #: Evaluations since the last improvement, for early stopping.
    stale: int = 0
    #: Evaluation with the lowest loss so far.
    best: ValidationPoint | None = None
    steps: list[LossPoint] = field(default_factory=list)
    evaluations: list[ValidationPoint] = field(default_factory=list)
    #: Steps without an update, because a loss or gradient was non-finite.
    skipped: list[SkippedStep] = field(default_factory=list)
    #: Ranges of steps omitted by rolling back to a checkpoint.
    left_out: list[RollbackRange] = field(default_factory=list)
    stopped_early: bool = False
    #: Maximum rows of an evaluation batch; 0 until the ranks have agreed on a number.
    evaluation_rows: int = 0


@dataclass
class TrainingState:
    """Model, optimiser, loss scaler, averaged weights, best weights and progress.

    The best weights are in pinned host memory, those of a replicated model on rank 0 only.

    For a model with adapters, "weights" means the adapters: the base does not change.
    """

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    best_weights: dict[str, Tensor]
    progress: Progress
    traits: ModelTraits = field(default_factory=ModelTraits)
    averaged: AveragedWeights | None = None
    #: Teacher for distillation, if any.
    teacher: Teacher | None = None
    #: True if the loss of tokens is computed by Triton kernels.
    fused_loss: bool = False
    #: Weights of the classes in the loss, on the device; None if all are 1.
    class_weights: Tensor | None = None
    #: Conditions of bitwise reproducibility, see :mod:`slipstream.pipeline.train.identity`.
    conditions: dict[str, object] = field(default_factory=dict)
    #: Sum of this rank's losses since the last history point, and the number of their rows.
    loss_sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    #: History points not yet summed over the ranks: the step, and this rank's ``loss_sums`` at that step.
    pending_points: list[tuple[int, list[float]]] = field(default_factory=list)
    #: All parameters of the model, listed once because listing takes time.
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    @property
    def model(self) -> Predictor:
        """This rank's part of the model."""
        return self.parallel.model

    def app_state(self) -> AppState:
        """Return the objects whose state a checkpoint holds in addition to :meth:`to_save`."""
        parts: dict[str, Stateful] = {"scaler": self.scaler}
        if self.averaged:
            parts["ema"] = self.averaged
        return AppState(self.model, self.optimizer, {**parts, **self.parallel.parts})

    def to_save(self) -> dict[str, object]:
        """Return progress, best weights and ``conditions`` for a checkpoint."""
        return {
            "progress": to_tree(self.progress),
            "best_weights": self.best_weights,
            "conditions": self.conditions,
        }

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights to evaluate and export: the averaged weights if there are any."""
        weights = own_state(self.model)
        return {**weights, **self.averaged.weights} if self.averaged else weights

    def copy_initial_weights(self) -> None:
        """Set the averaged and the best weights to the model's current weights."""
        if self.averaged:
            self.averaged.restart()
        self.stage_best_weights()()

    def stage_best_weights(self) -> Callable[[], None]:
        """Start copying the current weights to ``best_weights``; see :func:`.stage_copies` for the result."""
        weights = {name: tensor for name, tensor in self.weights().items() if name in self.best_weights}
        changed_by_step = (*self.parameters, *(self.averaged.weights.values() if self.averaged else ()))
        return stage_copies(self.best_weights, weights, changed_later(weights, changed_by_step))

    def rank_state(self) -> dict[str, object]:
        """Return this rank's loss sums and pending history points, which differ between ranks."""
        return {"losses": list(self.loss_sums), "points": [[step, *losses] for step, losses in self.pending_points]}

    def apply(self, restored: RestoredCheckpoint, group: RankContext) -> None:
        """Continue from a restored checkpoint.

        If the number or layout of ranks changed, rank 0 gets the loss sums of all.
        """
        names = {one.name for one in fields(Progress)}
        progress: Mapping[str, Any] = restored.progress["progress"]
        # Older checkpoints lack new fields, hold removed ones, and store None as an empty tree.
        lasting = {name: value for name, value in progress.items() if name in names and value != {}}
        self.progress = from_tree(lasting, Progress, restored.source)
        for name, tensor in restored.progress["best_weights"].items():
            if tensor is not self.best_weights[name]:  # else restored in place
                self.best_weights[name].copy_(tensor)
        # Older checkpoints hold only losses: their ranks had already added up the points.
        ranks = [each if isinstance(each, dict) else {"losses": each, "points": []} for each in restored.rank_states]
        ranks = [ranks[group.rank]] if restored.same_world else ranks
        # All ranks exchange the same points; those of other ranks are empty if rank 0 has all the losses.
        counted = ranks if restored.same_world or group.rank == 0 else []
        self.loss_sums = sum_losses([each["losses"] for each in counted])
        self.pending_points = [
            (step, sum_losses([each["points"][number][1:] for each in counted]))
            for number, (step, *_) in enumerate(ranks[0]["points"])
        ]


def sum_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """Sum (loss, rows) pairs of several ranks."""
    return [sum(loss for loss, _ in losses), sum(rows for _, rows in losses)]


def copy_weights(model: Predictor) -> dict[str, Tensor]:
    """Return a copy of the model's own weights (without its base) on the host, pinned if they are on a GPU."""
    weights = own_state(model)
    buffers = host_buffers(weights)
    stage_copies(buffers, weights, ())()
    return {name: with_placement_of(tensor, buffers[name]) for name, tensor in weights.items()}
