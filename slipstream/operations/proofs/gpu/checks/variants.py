"""Variants of training, compared with plain training on the same rows."""

from __future__ import annotations

import copy
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.attempts import TrainingJob, end_of_log, run_attempt
from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.trainings import train_transformer, write_table, write_tokens
from slipstream.pipeline.train.checks import check_compiler
from slipstream.pipeline.train.device_clock import synchronise_device
from slipstream.pipeline.train.loop.optimizer import EARLY, AveragedWeights
from slipstream.pipeline.train.parallel.config import GradientsConfig, ParallelConfig
from slipstream.shared.artifacts.results.training import History, read_attempt, read_history
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model, zero_inputs
from slipstream.shared.models.trained import TrainedModel

ROWS, BATCH = 192, 8
STEPS = ROWS // BATCH
DECAY = 0.9


def trained(context: CheckContext, name: str, **settings: Any) -> History:
    """Train a small transformer in fp32 and return its history."""
    prepared = context.directory / "tokens"
    if not prepared.exists():
        write_tokens(prepared, ROWS)
    precise = {"precision": "fp32", "epochs": 1, "batch_size": BATCH}
    history = read_history(train_transformer(context.directory / name, prepared, **{**precise, **settings}))
    assert history.steps_total == STEPS and history.steps[-1].loss < history.steps[0].loss, "the loss does not fall"
    return history


def apart(one: History, other: History) -> float:
    """Return the largest difference of two trainings' losses."""
    return max(abs(a.loss - b.loss) for a, b in zip(one.steps, other.steps, strict=True))


def offload(context: CheckContext) -> Sequence[CheckFigure]:
    plain = trained(context, "plain")
    difference = apart(plain, trained(context, "offloaded", parallel=ParallelConfig(shard="weights", offload=True)))
    return [CheckFigure("losses differ by", difference)]


def powersgd(context: CheckContext) -> Sequence[CheckFigure]:
    """Train with PowerSGD. A single process gets its own gradient, but for an error."""
    history = trained(context, "powersgd", gradients=GradientsConfig(hook="powersgd"))
    first, last = history.steps[0].loss, history.steps[-1].loss
    return [CheckFigure("first loss", first), CheckFigure("last loss, of the first", 100 * last / first, "%")]


def averaged(context: CheckContext) -> Sequence[CheckFigure]:
    """Compare with averages in float64 on the host."""
    expected, seen, update = dict[str, Tensor](), list[AveragedWeights](), AveragedWeights.update

    def noting(self: AveragedWeights, step: int, skip: Tensor) -> None:
        if not seen:
            expected.update({name: tensor.double().cpu() for name, tensor in self.weights.items()})
            seen.append(self)
        update(self, step, skip)
        share = 1 - min(DECAY, (1 + step) / (EARLY + step))
        for average, parameter in zip(expected.values(), self._model.parameters(), strict=True):
            average.lerp_(parameter.detach().double().cpu(), share)

    with mock.patch.object(AveragedWeights, "update", noting):
        trained(context, "averaged", ema=DECAY)
    (ours,) = seen
    worst = max((ours.weights[name].double().cpu() - average).abs().max().item() for name, average in expected.items())
    return [CheckFigure("averages differ by", worst)]


def nonfinite(context: CheckContext) -> Sequence[CheckFigure]:
    write_table(context.directory / "table", "classification")
    job = TrainingJob(
        context.directory / "table",
        context.directory / "poisoned",
        1,
        str(context.directory / "home"),
        poisoned=(5,),
        patience_s=60,
    )
    assert run_attempt(job).finished, end_of_log(job)
    history = read_history(job.output)
    skipped = [each.step for each in history.skipped]
    assert len(skipped) == 1, f"skipped: {skipped}"
    weights = TrainedModel.open(job.output).load().state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())
    return [CheckFigure("skipped step", float(skipped[0]))]


def graphs(context: CheckContext) -> Iterator[CheckFigure]:
    """Measure the gain of CUDA graphs for a model whose kernels are shorter than their launches."""
    if context.device.type == "cpu":
        raise CannotRun("a CPU has no graphs")
    data = write_table(context.directory / "table", "classification")
    model = build_model(ModelConfig("mlp", {"dropout": 0.0}), data.signature, seed=0).to(context.device)
    inputs = tuple(zero_inputs(data.signature, 256, context.device))
    # A copy, because it replaces the module's forward.
    captured = cast(nn.Module, torch.cuda.make_graphed_callables(copy.deepcopy(model), inputs))
    for one, other in zip(gradients(captured, inputs), gradients(model, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    eager, graphed = (seconds(partial(gradients, each, inputs), context) for each in (model, captured))
    yield CheckFigure("a captured pass of the MLP", eager / graphed, "x as fast")


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of a loss that is not linear in the outputs."""
    model.zero_grad(set_to_none=True)
    model(*inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def seconds(work: Callable[[], object], context: CheckContext) -> float:
    """Return the seconds of 20 passes, the best of 5 measurements."""
    best = math.inf
    for _ in range(5):
        synchronise_device(context.device)
        started = time.perf_counter()
        for _ in range(20):
            work()
        synchronise_device(context.device)
        best = min(best, time.perf_counter() - started)
    return best


def compiled(context: CheckContext) -> Iterator[CheckFigure]:
    gpu = context.device.type == "cuda"
    if gpu and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise CannotRun("Triton needs Python.h: install Python's development files")
    try:
        check_compiler(gpu)
    except UserError as lacks:
        raise CannotRun(lacks.message) from None
    plain = trained(context, "eager")
    history = trained(context, "compiled", compile=True)
    figures = read_attempt(context.directory / "compiled").compiled
    assert figures, "nothing was compiled"
    difference = apart(plain, history)
    yield CheckFigure("losses differ by", difference)
    yield CheckFigure("compiled in", figures.seconds, "s")
    yield CheckFigure("a pass against eager", figures.plain_pass_s / figures.pass_s, "x as fast")
