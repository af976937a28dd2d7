"""Trainings of two processes with one known fault, which the diagnosis has to name.

Each rank is a fresh process with one thread: ``python -m harness.provoked SETTINGS.json``. A step of a healthy run
takes about 25 ms, nearly all of it computing.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness.links import REPOSITORY, SEARCH_PATH, NotAllowed, linked
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import TARGET, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.results import devices as causes
from slipstream.shared.artifacts.results.devices import Bottleneck

WORLD, COLUMNS, BATCH = 2, 64, 2048
#: Steps of a run, batches per epoch, and rows of validation.
STEPS, EPOCH, VALIDATION = 160, 20, 8 * BATCH
LINK_MBIT = 200.0
#: CPUs used by other processes above which a run is repeated, and the largest number of runs.
QUIET_CPUS, TRIES = 0.3, 3
#: Ratio of a run's time to a healthy run's time below which the fault had no effect.
BITES = 1.3


@dataclass(frozen=True)
class Provocation:
    """Fault injected into a run, and the ``cause`` that the diagnosis has to name; "" for none."""

    name: str
    cause: str
    batch_size: int = BATCH
    layers: tuple[int, ...] = (256, 256, 256)
    evaluate_every: int = 10**6
    checkpoint_every: int = 10**6
    #: Additional seconds for gathering the rows of one batch, and the ranks with this delay.
    gathering_s: float = 0.0
    slow_ranks: tuple[int, ...] = ()
    #: Seconds of additional work in the backward pass of rank 1.
    backward_s: float = 0.0
    mbit: float = 0.0
    #: CPU quota of both processes together, in CPUs; 0 for none.
    cpus: float = 0.0


HEALTHY = Provocation("healthy", "")
PROVOCATIONS = (
    Provocation("slow loader on all", causes.DATA, gathering_s=0.1, slow_ranks=(0, 1)),
    Provocation("slow loader on one", causes.DATA, gathering_s=0.1, slow_ranks=(1,)),
    Provocation("slow link", causes.COMMUNICATION, mbit=LINK_MBIT),
    Provocation("slow rank", causes.STRAGGLER, backward_s=0.025),
    Provocation("CPU quota", causes.THROTTLED, cpus=1.0),
    Provocation("tiny batches", causes.LAUNCH, batch_size=8, layers=(16,) * 60),
    Provocation("a checkpoint each step", causes.CHECKPOINT, checkpoint_every=1),
    Provocation("many evaluations", causes.EVALUATION, evaluate_every=2),
)


def varied(provocation: Provocation, seed: int) -> Provocation:
    """Return the same fault, up to a fifth stronger or weaker."""
    by = random.Random(f"{provocation.name} {seed}").uniform(0.85, 1.2)
    return replace(
        provocation,
        gathering_s=provocation.gathering_s * by,
        backward_s=provocation.backward_s * by,
        mbit=provocation.mbit / by,
        cpus=provocation.cpus / by,
    )


@dataclass(frozen=True)
class Outcome:
    """A run's diagnosis, training seconds per row, and the mean number of CPUs that other processes used."""

    bottleneck: Bottleneck
    row_s: float
    others_cpus: float

    @property
    def step_s(self) -> float:
        """Mean seconds per step, including the time between steps."""
        return self.bottleneck.seconds / self.bottleneck.steps

    @property
    def predicted_s(self) -> float:
        """Seconds per step that the diagnosis predicts once its cause is removed."""
        return self.step_s / self.bottleneck.gain


def prepared_table(directory: Path, rows: int) -> Path:
    """Write prepared data of standard normal features, with two classes that a plane separates."""
    signature = Signature((TensorSpec("numeric", "float32", (COLUMNS,)),), "classification", "y", ("a", "b"))
    writer = ArtifactWriter(directory)
    for seed, (name, count) in enumerate({"train": rows, "validation": VALIDATION, "test": 64}.items()):
        records = np.zeros(count, signature.record)
        records["numeric"] = np.random.default_rng(seed).normal(size=(count, COLUMNS))
        records[TARGET] = records["numeric"][:, 0] > 0
        with writer.create(f"{name}-00000.rows", 4096 * signature.record.itemsize) as file:
            file.write(records.tobytes())
    write_record(writer, "signature.json", signature)
    writer.finish("prepare", {})
    return directory


def run_with(provocation: Provocation, tables: Path, place: Path, steps: int = STEPS) -> Outcome:
    """Train with a fault in the new directory ``place``, and return the outcome.

    The table in ``tables`` is written if it is missing. Raises ``NotAllowed`` where the fault cannot be provoked.
    """
    from slipstream.shared.artifacts.results.training import read_attempt

    words = [sys.executable, "-m", "harness.provoked", str(written_settings(provocation, tables, place, steps))]
    began, busy, own = time.perf_counter(), machine_cpu_s(), children_cpu_s()
    with ExitStack() as kept:
        if provocation.mbit:
            ended = kept.enter_context(linked(WORLD, provocation.mbit)).command(words, REPOSITORY)
        else:
            group = kept.enter_context(quota(provocation.cpus)) if provocation.cpus else None
            ended = run_ranks(words, group)
    assert [code for code, _ in ended] == [0] * WORLD, "\n".join(output for _, output in ended)
    others_s = machine_cpu_s() - busy - (children_cpu_s() - own)
    found = read_attempt(place / "model").bottleneck
    assert found is not None
    row_s = found.seconds / found.steps / provocation.batch_size
    return Outcome(found, row_s, max(0.0, others_s) / (time.perf_counter() - began))


def quiet_run(provocation: Provocation, tables: Path, place: Path, steps: int = STEPS) -> Outcome:
    """Run with a fault; repeat while other processes used more than :data:`QUIET_CPUS`, at most :data:`TRIES` runs."""
    for number in range(TRIES):
        found = run_with(provocation, tables, place / str(number), steps)
        if found.others_cpus < QUIET_CPUS:
            break
    return found


def written_settings(provocation: Provocation, tables: Path, place: Path, steps: int) -> Path:
    """Write the ranks' settings file; creates ``place``, and the table if it is missing."""
    place.mkdir(parents=True)
    prepared = tables / f"batch-{provocation.batch_size}"
    if not prepared.exists():
        prepared_table(prepared, EPOCH * provocation.batch_size)
    settings = {**asdict(provocation), "prepared": str(prepared), "place": str(place), "steps": steps}
    (place / "settings.json").write_text(json.dumps(settings))
    return place / "settings.json"


def machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system)


def children_cpu_s() -> float:
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def run_ranks(words: Sequence[str], group: Path | None) -> list[tuple[int, str]]:
    port, started = free_port(), list[subprocess.Popen[str]]()
    for rank in range(WORLD):
        its: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        its |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": SEARCH_PATH}
        environment = os.environ | {name: str(value) for name, value in its.items()}
        enter = None if group is None else (lambda group=group: (group / "cgroup.procs").write_text(str(os.getpid())))
        started.append(
            subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=enter,
            )
        )
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, said, strict=True)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def quota(cpus: float) -> Iterator[Path]:
    """Create a cgroup (v1 or v2) with ``cpus`` CPUs. Raises ``NotAllowed`` where this is impossible."""
    hierarchy = Path("/sys/fs/cgroup")
    version_2 = (hierarchy / "cgroup.controllers").exists()
    group = (hierarchy if version_2 else hierarchy / "cpu") / f"quota-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        if version_2:
            (group / "cpu.max").write_text(f"{round(100_000 * cpus)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * cpus)))
    except OSError as error:
        if group.exists():
            group.rmdir()
        raise NotAllowed(f"no control group with a CPU quota can be made here: {error}") from None
    try:
        yield group
    finally:
        group.rmdir()


def main(settings: dict[str, Any]) -> None:
    """Run one rank with the fault in ``settings``."""
    import torch

    torch.set_num_threads(1)
    from slipstream.pipeline.train.config import TrainingConfig
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.pipeline.train.run import run_attempt
    from slipstream.shared.models.config import ModelConfig

    rank, place = int(os.environ["RANK"]), Path(settings["place"])
    if rank in settings["slow_ranks"]:
        slow_gathering(settings["gathering_s"])
    if rank == 1 and settings["backward_s"]:
        slow_backward(settings["backward_s"])
    training = TrainingConfig(
        epochs=-(-settings["steps"] // EPOCH),
        batch_size=settings["batch_size"],
        evaluate_every=settings["evaluate_every"],
        checkpoint_every=settings["checkpoint_every"],
        patience=0,
    )
    run_attempt(
        TrainingRequest(
            prepared=Path(settings["prepared"]),
            model=ModelConfig("mlp", {"hidden": settings["layers"]}),
            training=training,
            directory=place / "model",
            home=str(place / "checkpoints"),
            made_by={},
        )
    )


def slow_gathering(seconds: float) -> None:
    """Delay every batch of this rank by ``seconds``, as a slow disk does."""
    from slipstream.pipeline.train.data_loader import StoredRows

    gather = StoredRows.gather

    def slowly(self: StoredRows, rows: np.ndarray, out: np.ndarray) -> None:
        time.sleep(seconds * len(rows) / (BATCH // WORLD))
        gather(self, rows, out)

    StoredRows.gather = slowly  # type: ignore[method-assign]


def slow_backward(seconds: float) -> None:
    """Add ``seconds`` of matmuls to the backward pass of every step."""
    import torch

    from slipstream.pipeline.train.telemetry.marks import StepMarks

    mark, busy = StepMarks.backward_of, products(seconds)

    def watched(self: StepMarks, loss: torch.Tensor) -> None:
        mark(self, loss)
        loss.register_hook(busy)

    StepMarks.backward_of = watched  # type: ignore[method-assign]


def products(seconds: float) -> Callable[[object], None]:
    """Return a gradient hook that computes matmuls for ``seconds``."""
    import torch

    matrix = torch.ones(128, 128)
    began = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    each = (time.perf_counter() - began) / 200

    def busy(gradient: object) -> None:
        for _ in range(round(seconds / each)):
            matrix @ matrix

    return busy


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
