"""Lower bound on the memory of a training: the state that a process keeps between steps.

It is the mean over the processes that hold the same part of the model, so the largest needs at least as much. A
training that exceeds memory by this bound cannot fit; others may still not fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import psutil

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig, Shard
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import size_text
from slipstream.shared.machine.gpus import bf16_gpus, visible_gpus
from slipstream.shared.machine.limits import memory_allowed
from slipstream.shared.models.adapters.network import hold_frozen
from slipstream.shared.models.arithmetic import choose_precision
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.telemetry.preflight import visible_memory

#: Factors by which a message may suggest to increase the number of devices.
MORE = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class ModelState:
    """Bytes of an undivided model: ``weights``, ``trained`` weights and their averaged copy; optimiser's moments."""

    weights: int
    trained: int
    averaged: int = 0
    moments: int = 2

    @classmethod
    def of(cls, predictor: Predictor, training: TrainingConfig) -> ModelState:
        sizes = [(each.numel() * each.element_size(), each.requires_grad) for each in predictor.parameters()]
        weights, trained = sum(number for number, _ in sizes), sum(number for number, trains in sizes if trains)
        moments = 2 if training.optimizer == "adamw" else int(training.momentum > 0)
        return cls(weights, trained, trained if training.ema else 0, moments)

    def of_process(self, parallel: ParallelConfig, processes: int, nodes: int, precision: str) -> int:
        """Return a lower bound of a device's peak in a step, in bytes; 0 with offloading.

        Raises ``UserError`` like :meth:`.ParallelConfig.sizes`.
        """
        if parallel.offload:
            return 0
        stages, _, shards, tensor = parallel.sizes(processes, nodes)
        parts = stages * tensor
        kept, gradients = self.weights + self.moments * self.trained + self.averaged, self.trained
        # The weights stay gathered between the forward and backward pass of a micro-batch.
        whole = parallel.shard in ("optimizer", "gradients") and shards > 1
        gathered = self.weights // (2 if precision == "bf16" else 1) if whole else 0
        return max((kept + gradients) // (parts * shards), kept // (parts * shards) + gathered // parts)


@dataclass(frozen=True)
class MemoryCapacity:
    """Memory of a device, or per process on a host; ``name`` is its label in messages."""

    bytes: float
    name: str


def room_of_a_process(processes: int) -> MemoryCapacity | None:
    """Return the smallest total memory among this machine's first ``processes`` GPUs.

    Without GPUs, returns host memory per process; None if no driver reports the memory of a GPU.
    """
    if not visible_gpus():
        return room_of_host(processes)
    found = [gpu for gpu in visible_memory(os.environ)[:processes] if gpu.total_bytes]
    smallest = min(found, key=lambda gpu: gpu.total_bytes, default=None)
    return MemoryCapacity(smallest.total_bytes, smallest.label) if smallest else None


def room_of_host(processes: int) -> MemoryCapacity:
    """Return this machine's memory per process."""
    limit = memory_allowed() or psutil.virtual_memory().total + psutil.swap_memory().total
    return MemoryCapacity(
        limit / processes, "this machine" if processes == 1 else f"each of {processes} processes here"
    )


def check_fits(prepared: Path, model: ModelConfig, training: TrainingConfig, processes: int, nodes: int) -> None:
    """Raise ``UserError`` if a process cannot hold the state that it keeps between steps.

    The nodes are assumed to equal this machine. A model that cannot be built on the meta device is not checked here.
    """
    try:
        predictor = build_model(model, open_prepared(prepared).signature, training.seed, shapes_alone=True)
    except UserError:
        return
    precision = choose_precision(training.precision, gpu=visible_gpus() > 0, bf16=bf16_gpus())
    if predictor.adapted:
        hold_frozen(predictor.network, precision)
    room = room_of_a_process(processes // nodes)
    refuse_what_cannot_fit(ModelState.of(predictor, training), training.parallel, processes, nodes, precision, room)


def refuse_what_cannot_fit(
    state: ModelState, parallel: ParallelConfig, processes: int, nodes: int, precision: str, room: MemoryCapacity | None
) -> None:
    """Raise ``UserError`` if a process with memory ``room`` cannot hold its part of the state.

    None as ``room`` skips the check.
    """
    needed = state.of_process(parallel, processes, nodes, precision)
    if room is None or needed <= room.bytes:
        return
    what_fits = (
        f"{name} (at least {size_text(less)})"
        for name, less in less_for_each(state, parallel, processes, nodes, precision)
        if less <= room.bytes
    )
    expected = next(what_fits, "a smaller model")
    raise UserError(
        f"training.parallel: a process keeps {size_text(needed)} of weights, gradients and moments, without any batch, "
        f"and {room.name} has {size_text(room.bytes)}; expected {expected}, or devices with more than "
        f"{size_text(needed)}"
    )


def less_for_each(
    state: ModelState, parallel: ParallelConfig, processes: int, nodes: int, precision: str
) -> Iterator[tuple[str, int]]:
    """Yield other layouts, then more devices, with bytes per process; the smallest change comes first."""
    shards: tuple[Shard, ...] = () if state.averaged else get_args(Shard)[1:]
    for shard in shards if processes > 1 else ():
        yield (
            f"training.parallel.shard {shard}",
            state.of_process(replace(parallel, shard=shard), processes, nodes, precision),
        )
    for times in MORE if shards else ():
        yield (
            f"{times} times as many of them with training.parallel.shard weights, replicas 1",
            state.of_process(
                replace(parallel, shard="weights", replicas=1), times * processes, times * nodes, precision
            ),
        )
