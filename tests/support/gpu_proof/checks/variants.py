"""Other ways of training, each beside the plain one on the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from slipstream.artifacts.results.training import History, read_attempt, read_history
from slipstream.models.trained import TrainedModel
from slipstream.train.loop.optimizer import EARLY, AveragedWeights
from slipstream.train.parallel.config import GradientsConfig, ParallelConfig
from tests.support.gpu_proof.check import Figure, Place
from tests.support.gpu_proof.trainings import train_transformer, write_tokens
from tests.support.toys import table
from tests.support.training_runs import Job, attempt

ROWS, BATCH = 192, 8
STEPS = ROWS // BATCH
DECAY = 0.9
#: Of losses in fp32, between kernels that add in another order.
ROUNDING = 1e-3


def trained(place: Place, name: str, **settings: Any) -> History:
    """A small transformer in fp32."""
    prepared = place.directory / "tokens"
    if not prepared.exists():
        write_tokens(prepared, ROWS)
    precise = {"precision": "fp32", "epochs": 1, "batch_size": BATCH}
    history = read_history(train_transformer(place.directory / name, prepared, **{**precise, **settings}))
    assert history.steps_total == STEPS and history.steps[-1].loss < history.steps[0].loss, "the loss does not fall"
    return history


def apart(one: History, other: History) -> float:
    """The largest difference of two trainings' losses."""
    return max(abs(a.loss - b.loss) for a, b in zip(one.steps, other.steps, strict=True))


def offload(place: Place) -> Sequence[Figure]:
    plain = trained(place, "plain")
    difference = apart(plain, trained(place, "offloaded", parallel=ParallelConfig(shard="weights", offload=True)))
    assert difference < ROUNDING, f"losses differ by {difference:g}"
    return [Figure("losses differ by", difference)]


def powersgd(place: Place) -> Sequence[Figure]:
    """Of one process the mean is its own gradient, but for what thin matrices leave out, which is given back later."""
    history = trained(place, "powersgd", gradients=GradientsConfig(hook="powersgd"))
    return [Figure("first loss", history.steps[0].loss), Figure("last", history.steps[-1].loss)]


def averaged(place: Place) -> Sequence[Figure]:
    """Against averages that are kept beside them in float64 on the host."""
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
        trained(place, "averaged", ema=DECAY)
    (ours,) = seen
    worst = max((ours.weights[name].double().cpu() - average).abs().max().item() for name, average in expected.items())
    assert worst < 1e-5, f"averages differ by {worst:g}"
    return [Figure("averages differ by", worst)]


def nonfinite(place: Place) -> Sequence[Figure]:
    table(place.directory / "table", "classification")
    job = Job(place.directory / "table", place.directory / "poisoned", 1, str(place.directory / "home"), poisoned=(5,))
    assert attempt(job).finished, (job.place / "log-0").read_text()[-500:]
    history = read_history(job.output)
    skipped = [each.step for each in history.skipped]
    assert skipped == [5], f"skipped: {skipped}"
    weights = TrainedModel.open(job.output).load().state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())
    return [Figure("skipped step", float(skipped[0]))]


def compiled(place: Place) -> Iterator[Figure]:
    plain = trained(place, "eager")
    history = trained(place, "compiled", compile=True)
    figures = read_attempt(place.directory / "compiled").compiled
    assert figures, "nothing was compiled"
    difference = apart(plain, history)
    assert difference < ROUNDING, f"losses differ by {difference:g}"
    yield Figure("losses differ by", difference)
    yield Figure("compiled in", figures.seconds, "s")
    yield Figure("a pass against eager", figures.plain_pass_s / figures.pass_s, "x as fast")
