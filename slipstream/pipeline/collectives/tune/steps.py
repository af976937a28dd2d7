"""Timing of distributed training steps with two settings in turn; runs in the tuner's workers."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from slipstream.pipeline.collectives.launch.timing import slowest_rank_seconds
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.tune.decision import FEWEST_TURNS
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.interconnect.model.hockney import Compute, bucket_sizes
from slipstream.shared.interconnect.tuning import DdpSettings
from slipstream.shared.models.arithmetic import Arithmetic, autocast_context, resolve_precision, tf32_allowed
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model, zero_inputs

WARM_UP, COMPUTE_STEPS = 3, 7
MOST_TURNS = 60
#: Minimum seconds per setting and turn, because a single step may be too short for the clock.
SLOT_S = 0.05


@dataclass(frozen=True)
class ConfiguredModel:
    """The user's model, with zeros as inputs."""

    model: ModelConfig
    signature: Signature
    #: Rows of one rank's batch.
    rows: int
    seed: int = 0
    arithmetic: Arithmetic = Arithmetic()

    def __str__(self) -> str:
        return f"model {self.model.name} with {self.rows} rows on each rank"

    def build(self) -> tuple[nn.Module, list[Tensor]]:
        """Return the module and its inputs.

        Raises ``UserError`` if the model cannot be built.
        """
        return build_model(self.model, self.signature, self.seed), zero_inputs(self.signature, self.rows)


@dataclass(frozen=True)
class SyntheticModel:
    """Linear layers with about ``megabytes`` of gradients, used without prepared data."""

    megabytes: int = 16
    width: int = 512
    arithmetic: Arithmetic = Arithmetic()

    def __str__(self) -> str:
        return f"a synthetic model with {self.megabytes} MB of gradients"

    def build(self) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        layers = max(1, (self.megabytes << 20) // (4 * self.width * self.width))
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(layers))), [torch.zeros(8, self.width)]


Model = ConfiguredModel | SyntheticModel
#: Module and its inputs.
Built = tuple[nn.Module, list[Tensor]]


class DdpTrainer:
    """Trainer of a copy of the module ``built``, with DDP ``settings`` and the precision of ``model``."""

    def __init__(self, model: Model, built: Built, settings: DdpSettings, device: torch.device) -> None:
        module, inputs = copy.deepcopy(built[0]).to(device), built[1]
        self._device, self._inputs = device, [x.to(device) for x in inputs]
        self._precision, self._tf32 = resolve_precision(model.arithmetic.precision, device), model.arithmetic.tf32
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        if settings.hook == "fp16":
            self._ddp.register_comm_hook(None, fp16_compress_hook)
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        with tf32_allowed(self._tf32):
            with autocast_context(self._precision, self._device):
                loss = self._ddp(*self._inputs).float().mean()
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def seconds(self, steps: int) -> float:
        """Return the mean seconds per step over ``steps`` steps, by this rank's clock."""
        dist.barrier()
        started = now(self._device)
        for _ in range(steps):
            self.step()
        return (now(self._device) - started) / steps


def measure_compute(worker: WorkerContext, model: Model) -> Compute:
    """Return median times of the phases of a step without communication.

    All ranks compute at the same time, as in training.
    """
    worker.set_activity("steps without communication")
    module, inputs = model.build()
    module, inputs = module.to(worker.device), [x.to(worker.device) for x in inputs]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    precision = resolve_precision(model.arithmetic.precision, worker.device)
    times = []
    with tf32_allowed(model.arithmetic.tf32):
        for _ in range(WARM_UP + COMPUTE_STEPS):
            marks = [now(worker.device)]
            with autocast_context(precision, worker.device):
                loss = module(*inputs).float().mean()
            marks.append(now(worker.device))
            loss.backward()
            marks.append(now(worker.device))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(np.diff([*marks, now(worker.device)]))
    forward, backward, update = map(float, slowest_rank_seconds(np.median(times[WARM_UP:], axis=0), worker.device))
    return Compute(forward, backward, update, gradients_of(module))


def gradients_of(module: nn.Module) -> tuple[int, ...]:
    """Return the bytes of every gradient, in parameter order."""
    return tuple(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_alternately(
    worker: WorkerContext,
    model: Model,
    in_use: DdpSettings,
    other: DdpSettings,
    budget: float,
    most: float = math.inf,
) -> tuple[list[float], list[float]]:
    """Return the seconds per step in every turn, for both settings; the longest over the ranks.

    Takes about ``budget`` seconds with warm-up, but at least ``FEWEST_TURNS`` turns unless these take more than
    ``most`` seconds. The order of the settings
    alternates between turns, so that a rising or falling load favours neither.
    """
    worker.set_activity(f"steps with {other}")
    started = time.perf_counter()
    built = model.build()
    trainers = [DdpTrainer(model, built, settings, worker.device) for settings in (in_use, other)]
    pilot = np.array([trainer.seconds(1) for trainer in trainers])
    steps = max(1, round(SLOT_S / float(slowest_rank_seconds(pilot, worker.device).max())))
    found: list[np.ndarray] = []
    while len(found) < MOST_TURNS:
        mine = np.empty(3)
        for which in (0, 1) if len(found) % 2 == 0 else (1, 0):
            mine[which] = trainers[which].seconds(steps)
        mine[2] = time.perf_counter() - started
        *both, elapsed = slowest_rank_seconds(mine, worker.device)
        found.append(np.array(both))
        if elapsed > budget and (len(found) >= FEWEST_TURNS or elapsed > most):
            break
    in_use_seconds, other_seconds = np.array(found).T.tolist()
    return in_use_seconds, other_seconds


def time_in_one_launch(
    worker: WorkerContext, model: Model, settings: DdpSettings, budget: float
) -> tuple[float, float]:
    """Return the median seconds of an all_reduce of the largest bucket, and of a training step.

    Used for variables that libraries read only at process start.
    """
    worker.set_activity(f"steps with {settings}")
    built = model.build()
    buffer = torch.zeros(max(bucket_sizes(gradients_of(built[0]))) // 4, device=worker.device)
    trainer = DdpTrainer(model, built, settings, worker.device)
    seconds: dict[str, list[float]] = {"reduce": [], "step": []}
    started = time.perf_counter()
    while True:
        seconds["reduce"].append(reduce_seconds(buffer))
        seconds["step"].append(trainer.seconds(1))
        count = torch.tensor([float(time.perf_counter() - started > budget)], device=worker.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)  # all ranks end together
        if count.item() and len(seconds["step"]) >= FEWEST_TURNS:
            break
    reduce, step = (float(np.median(slowest_rank_seconds(np.array(each), worker.device))) for each in seconds.values())
    return reduce, step


def reduce_seconds(buffer: Tensor) -> float:
    dist.barrier()
    started = now(buffer.device)
    dist.all_reduce(buffer)
    return now(buffer.device) - started
