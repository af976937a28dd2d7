"""Snapshots of a checkpoint, taken while the device computes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.check import CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.timed import size_for, timed_training
from slipstream.pipeline.train.checkpoint.home import Retention
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.staging import SnapshotBuffers
from slipstream.pipeline.train.checkpoint.state import AppState
from slipstream.pipeline.train.device_clock import device_clock, synchronise_device

MIB = 1 << 20
Snapshot = dict[str, Tensor]


@contextmanager
def snapshots() -> Iterator[list[Snapshot]]:
    """Yield a list that gets a copy of every snapshot when it is complete, before it is written."""
    taken, stage = list[Snapshot](), SnapshotBuffers.stage

    def noting(self: SnapshotBuffers, *arguments: object) -> Callable[[], Snapshot]:
        complete = stage(self, *arguments)  # type: ignore[arg-type]

        def noted() -> Snapshot:
            whole = complete()
            taken.append({name: tensor.clone() for name, tensor in whole.items()})
            return whole

        return noted

    with mock.patch.object(SnapshotBuffers, "stage", noting):
        yield taken


class BusyModel:
    """Model with steps that take long on the device after the host has enqueued them."""

    def __init__(self, context: CheckContext) -> None:
        self.width = 256 if context.small else 1024
        torch.manual_seed(0)
        layers = (nn.Linear(self.width, self.width, device=context.device) for _ in range(2 if context.small else 8))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batch = torch.randn(64, self.width, device=context.device)
        side = 256 if context.small else 8192
        self.large = torch.randn(side, side, device=context.device)
        self.matmuls = 1 if context.small else 5

    def compute(self) -> None:
        for _ in range(self.matmuls):
            self.large @ self.large

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def of_training(context: CheckContext) -> Iterator[CheckFigure]:
    """Train with a checkpoint every ten steps, and compare the stalls with the time of the steps."""
    size = size_for(context)
    steps = timed_training(context, "saved", size, checkpoint_every=10 if not context.small else 4)
    yield CheckFigure("stall", 1e3 * steps.stall_s, "ms")
    yield CheckFigure("stall, of the steps", 100 * steps.stall_s / (size.steps * steps.step_s), "%")
    yield CheckFigure("longest step", 1e3 * steps.longest_s, "ms")


def under_load(context: CheckContext) -> Iterator[CheckFigure]:
    """Start every save while matmuls are queued on the device; the next step changes its source."""
    saves = 5 if context.small else 50
    busy = BusyModel(context)
    busy.step()
    state = AppState(busy.model, busy.optimizer)
    stalls, wrong = list[float](), list[int]()
    with (
        snapshots() as taken,
        Checkpoints(
            str(context.directory / "home"),
            state,
            ResumePolicy({}),
            retention=Retention(last=1),
            clock=device_clock(context.device),
        ) as checkpoints,
    ):
        checkpoints.prepare({})
        for number in range(saves):
            busy.compute()
            busy.step()
            copies = {name: tensor.detach().clone() for name, tensor in checkpoints._tree({})[1].items()}
            busy.compute()
            stall = checkpoints.save(number + 1, {})
            busy.compute()
            busy.step()
            wait = checkpoints.background.pop_step_wait()
            stalls.append(stall + (wait.stall() if wait else 0.0))
            checkpoints.finish()
            assert len(taken) == 1, f"{len(taken)} snapshots of a save"
            if not equal(taken.pop(), {name: copy.cpu() for name, copy in copies.items()}):
                wrong.append(number + 1)
    yield CheckFigure("snapshots that differ", float(len(wrong)), f"of {saves}: {wrong}" if wrong else f"of {saves}")
    size, stalled = sum(copy.nbytes for copy in copies.values()), statistics.median(stalls)
    yield CheckFigure("state", size / MIB, "MiB")
    yield CheckFigure("stall of a save", 1e3 * stalled, "ms")
    speed = pinned_copy_speed(context)
    yield CheckFigure("copy to a pinned buffer", speed / 1e9, "GB/s")
    yield CheckFigure("stall, of a copy to a pinned buffer", 100 * stalled / (size / speed), "%")


def equal(ours: Snapshot, theirs: Snapshot) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def pinned_copy_speed(context: CheckContext) -> float:
    """Return the bytes per second of synchronous copies of 2 GB into one pinned buffer."""
    size = 16 * MIB if context.small else 2 * 10**9
    source = torch.zeros(size, dtype=torch.uint8, device=context.device)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=context.device.type == "cuda")
    took = []
    for _ in range(5):
        synchronise_device(context.device)
        started = time.perf_counter()
        buffer.copy_(source)
        synchronise_device(context.device)
        took.append(time.perf_counter() - started)
    return size / statistics.median(took)
