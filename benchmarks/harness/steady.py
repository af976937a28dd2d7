"""Trainer with constant step times, so that the overhead of other work shows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.pipeline.train.checkpoint.home import Retention
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.loop.optimizer import make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.train_loop import TrainLoop
from slipstream.pipeline.train.parallel.replicas import replicate_model
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.factory import Predictor

WORLD = 2
STEP_S = 0.02
WIDTH = 256
#: Kinds of steps. "device": sleep, as if waiting for a GPU; "host": compute on every core.
WORKS = ("device", "host")


class Steady(nn.Module):
    """Network of about 4 MB of state whose training steps take at least :data:`STEP_S`."""

    def __init__(self, pixels: int, outputs: int, work: str) -> None:
        super().__init__()
        self.work = work
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
            nn.Linear(WIDTH, outputs),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            busy(STEP_S) if self.work == "host" else time.sleep(STEP_S)
        return self.layers(inputs.float())


def busy(seconds: float) -> None:
    """Compute matmuls that take ``seconds`` on an idle core; the same amount of work every time."""
    matrix = torch.ones(128, 128)
    for _ in range(round(seconds / multiplication_s())):
        matrix @ matrix


def multiplication_s(known: list[float] = []) -> float:  # noqa: B006  (measured once per process)
    if not known:
        matrix, times = torch.ones(128, 128), []
        for _ in range(400):
            begun = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - begun)
        known.append(float(np.median(times)))
    return known[0]


class Spent(NamedTuple):
    """Wall seconds of a turn, and CPU seconds of the training thread."""

    wall: float
    cpu: float


class SteadyTrainer:
    """One of :data:`WORLD` ranks; every turn trains ``steps`` more steps."""

    def __init__(self, data: PreparedData, work: str, home: str, steps: int) -> None:
        self.data, self.steps = data, steps
        rows = sum(data.segment_rows("train"))
        self.training = TrainingConfig(batch_size=-(-rows // steps), evaluate_every=10**6, patience=0)
        self.group = RankContext(dist.get_rank(), WORLD, torch.device("cpu"), "gloo")
        torch.manual_seed(0)
        pixels = int(np.prod(data.signature.inputs[0].shape))
        predictor = Predictor(data.signature, Steady(pixels, data.signature.outputs, work))
        self.state = TrainingState(
            replicate_model(predictor, ModelTraits(), self.group),
            make_optimizer(predictor, self.training),
            LossScaler(self.group.device, enabled=False),
            copy_weights(predictor),
            Progress(),
        )
        self.checkpoints = Checkpoints(
            home, AppState(predictor, self.state.optimizer), ResumePolicy({}), retention=Retention(last=1)
        )
        self.checkpoints.prepare(self.state.to_save())
        self.turns = 0

    def recorder(self) -> GoodputRecorder:
        home, attempt = self.checkpoints.home, self.checkpoints.attempt
        return GoodputRecorder(home, attempt, WORLD, writes=self.group.rank == 0, started=time.perf_counter())

    def run(self, guard: Guard) -> Spent:
        self.turns += 1
        # The history of the training would grow, but checkpoints must keep their size.
        self.state.progress.steps.clear()
        self.state.progress.evaluations.clear()
        training = replace(self.training, epochs=self.turns)
        dist.barrier()
        began, cpu = time.perf_counter(), time.thread_time()
        TrainLoop(self.state, self.data, training, self.group, "fp32", guard).run(lambda *_: None)
        return Spent(time.perf_counter() - began, time.thread_time() - cpu)
