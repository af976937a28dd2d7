"""Stall of the training loop during a save: our checkpoints, torch.save and DCP's asynchronous checkpoints.

    python benchmarks/checkpoint.py [OPTIONS]

Two ranks hold the same state (weights and AdamW moments of a stack of linear layers). In every round each method saves
once, and a save ends before the next one starts. The methods are ``torch.save`` and fsync by rank 0 while rank 1 waits,
``dcp.async_save`` with its defaults, ``dcp.async_save`` with a cached stager, and our checkpoints. The stall is the
time that the slower rank's training loop is blocked; for our checkpoints it includes the wait of the next optimiser
step for the snapshot. ``steps`` is the mean step time during a save over the mean step time without one. Figures are
medians over all rounds but the first, which is reported separately.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from harness.command import benchmark
from harness.processes import on_ranks
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, settled
from slipstream.pipeline.train.checkpoint.home import Retention
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState

WORLD = 2
WIDTH = 1024
STEPS_AT_LEAST = 5
WAYS = ("torch.save + fsync", "dcp.async_save", "dcp, cached stager", "ours")


class Save(NamedTuple):
    """Handle of a started save.

    ``wait()`` blocks until the save is stored, ``busy()`` tells whether it is running, and ``late()`` returns the
    seconds that later steps waited for it.
    """

    wait: Callable[[], Any] = lambda: None
    busy: Callable[[], bool] = lambda: False
    late: Callable[[], float] = lambda: 0.0


#: Function that starts the save of the round with the given number.
Way = Callable[[int], Save]


class Trainer:
    """Stack of linear layers that AdamW trains on a fixed batch, the same on every rank."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(64, WIDTH)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def torch_save(trainer: Trainer, place: Path) -> Way:
    def save(round_: int) -> Save:
        if dist.get_rank() == 0:
            with (place / f"torch-{round_}.pt").open("wb") as file:
                torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return Save()

    return save


def dcp_async(trainer: Trainer, place: Path, name: str, stager: DefaultStager | None) -> Way:
    group = dist.new_group(backend="gloo")

    def save(round_: int) -> Save:
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        future: Any = dcp.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=place / f"{name}-{round_}",
            process_group=group,
            async_stager=stager,
        )
        return Save(future.result, lambda: not future.done())

    return save


def ours(trainer: Trainer, place: Path) -> Way:
    checkpoints = Checkpoints(
        str(place / "ours"),
        AppState(trainer.model, trainer.optimizer),
        ResumePolicy({}),
        retention=Retention(last=1),
    )
    checkpoints.prepare({})

    def stall() -> float:
        wait = checkpoints.background.pop_step_wait()
        return wait.stall() if wait else 0.0

    def save(round_: int) -> Save:
        checkpoints.save(round_ + 1, {})
        return Save(checkpoints.finish, checkpoints.background.busy, stall)

    return save


def slowest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def steps_while(trainer: Trainer, busy: Callable[[], bool]) -> float:
    """Train while ``busy()`` is true, at least a few steps, and return the mean step time in milliseconds."""
    started, done = time.perf_counter(), 0
    while done < STEPS_AT_LEAST or busy():
        trainer.step()
        done += 1
    return (time.perf_counter() - started) / done * 1e3


def measure(scratch: str, layers: int, rounds: int) -> dict[str, list[Figures]]:
    """Save ``rounds`` times with every method and return the figures of every round, as maxima over the ranks."""
    place = Path(scratch)
    trainer = Trainer(layers)
    trainer.step()
    cached = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    ways: dict[str, Way] = {
        WAYS[0]: torch_save(trainer, place),
        WAYS[1]: dcp_async(trainer, place, "plain", None),
        WAYS[2]: dcp_async(trainer, place, "cached", cached),
        WAYS[3]: ours(trainer, place),
    }
    numbers = {name: itertools.count() for name in ways}

    def once(name: str) -> Figures:
        alone = steps_while(trainer, lambda: False)
        dist.barrier()
        started = time.perf_counter()
        begun = ways[name](next(numbers[name]))
        stall = time.perf_counter() - started
        beside = steps_while(trainer, begun.busy)
        begun.wait()
        stall += begun.late()
        whole = time.perf_counter() - started
        figures = {"stall_ms": stall * 1e3, "steps": beside / alone, "until_stored_ms": whole * 1e3}
        figures = {key: slowest(value) for key, value in figures.items()}
        if dist.get_rank() == 0:
            for path in place.glob("*-[0-9]*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()
        return figures

    found = in_turns({name: functools.partial(once, name) for name in ways}, rounds)
    cached.close()
    return found


def summary(found: dict[str, list[Figures]]) -> dict[str, Figures]:
    rows = {name: {**settled(rounds), "first_stall_ms": rounds[0]["stall_ms"]} for name, rounds in found.items()}
    for row in rows.values():
        row["of_torch_save"] = row["stall_ms"] / rows[WAYS[0]]["stall_ms"]
    return rows


COLUMNS = (
    Column("stall ms", "stall_ms"),
    Column("first", "first_stall_ms", "{:.0f}"),
    Column("of torch.save", "of_torch_save", "{:.1%}"),
    Column("stored ms", "until_stored_ms", "{:.0f}"),
    Column("steps", "steps", "{:.2f}x"),
)


@benchmark
@click.option("--megabytes", default=300, show_default=True, help="State per rank: weights and two moments, in MB.")
@click.option("--rounds", default=11, show_default=True, help="Saves of every method; the first is separate.")
@click.option("--place", type=click.Path(path_type=Path), help="Directory on the disk to measure.")
def main(quick: bool, megabytes: int, rounds: int, place: Path | None) -> Iterator[Table]:
    """Measure how long each method of saving blocks the training loop."""
    if quick:
        megabytes, rounds = 13, 1
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1))))
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        rows = summary(on_ranks(WORLD, measure, scratch, layers, rounds))
    size = layers * 3 * 4 * WIDTH * (WIDTH + 1) / 1e6
    counted = f"medians of {rounds - 1} saves after the first" if rounds > 1 else "one save"
    title = f"{size:.0f} MB of replicated state on {WORLD} ranks, {counted}"
    yield Table(title, COLUMNS, rows)


if __name__ == "__main__":
    main()
