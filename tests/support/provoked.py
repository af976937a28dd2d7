"""Trainings of two processes that are held back by one known cause, of which the verdict has to be that cause.

Each rank is a fresh process with one thread: ``python -m tests.support.provoked SETTINGS.json``. The step of a healthy
run takes about 25 ms, nearly all of it computing.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import TARGET, Signature, TensorSpec
from slipstream.artifacts.records import write_record
from slipstream.artifacts.results import bottleneck as causes
from slipstream.artifacts.results.bottleneck import Bottleneck
from tests.support import REPOSITORY
from tests.support.control_groups import HIERARCHY, put
from tests.support.links import linked
from tests.support.processes import free_port

WORLD, COLUMNS, BATCH = 2, 64, 2048
#: An epoch is so many batches of the training split.
STEPS, EPOCH, VALIDATION = 160, 20, 8 * BATCH
LINK_MBIT = 200.0
#: Below this ratio of a run's time to a healthy one's the fault did not bite.
BITES = 1.3


@dataclass(frozen=True)
class Provocation:
    """What is wrong with a run, and which cause the verdict has to name; "" for none."""

    name: str
    cause: str
    batch_size: int = BATCH
    layers: tuple[int, ...] = (256, 256, 256)
    evaluate_every: int = 10**6
    checkpoint_every: int = 10**6
    #: Seconds that gathering the rows of one batch takes longer, and on which ranks.
    gathering_s: float = 0.0
    slow_ranks: tuple[int, ...] = ()
    #: Seconds of more work in the backward pass of rank 1.
    backward_s: float = 0.0
    mbit: float = 0.0
    #: CPUs that both processes may use together.
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
    """The same fault, up to a fifth stronger or weaker."""
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
    """What a run says of itself, seconds of its training for each row, and how many CPUs other processes used."""

    bottleneck: Bottleneck
    row_s: float
    others_cpus: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, with its part of what lies between steps."""
        return self.bottleneck.seconds / self.bottleneck.steps

    @property
    def predicted_s(self) -> float:
        """The same without the cause that it names."""
        return self.step_s / self.bottleneck.gain


def prepared_table(directory: Path, rows: int) -> Path:
    """Standard normal numbers of two classes that a plane divides."""
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
    """Train so, on a table that is made in ``tables`` if it is not there. Skips the test where the fault cannot be made
    here."""
    from slipstream.artifacts.results.training import read_attempt

    place.mkdir(parents=True)
    prepared = tables / f"batch-{provocation.batch_size}"
    if not prepared.exists():
        prepared_table(prepared, EPOCH * provocation.batch_size)
    settings = {**asdict(provocation), "prepared": str(prepared), "place": str(place), "steps": steps}
    (place / "settings.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "tests.support.provoked", str(place / "settings.json")]
    began, busy, own = time.perf_counter(), machine_cpu_s(), children_cpu_s()
    with ExitStack() as kept:
        if provocation.mbit:
            ended = kept.enter_context(linked(WORLD, provocation.mbit)).command(words, Path(REPOSITORY))
        else:
            group = kept.enter_context(quota(provocation.cpus)) if provocation.cpus else None
            ended = run_ranks(words, group)
    assert [code for code, _ in ended] == [0] * WORLD, "\n".join(output for _, output in ended)
    others_s = machine_cpu_s() - busy - (children_cpu_s() - own)
    found = read_attempt(place / "model").bottleneck
    assert found is not None
    row_s = found.seconds / found.steps / provocation.batch_size
    return Outcome(found, row_s, others_s / (time.perf_counter() - began))


def machine_cpu_s() -> float:
    """Seconds for which all processors of this machine were busy so far."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


def children_cpu_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def run_ranks(words: Sequence[str], group: Path | None) -> list[tuple[int, str]]:
    port, started = free_port(), list[subprocess.Popen[str]]()
    for rank in range(WORLD):
        its: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        its |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in its.items()}
        enter = None if group is None else (lambda group=group: put(os.getpid(), group))
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


@contextmanager
def quota(cpus: float) -> Iterator[Path]:
    """A control group of so many CPUs, version 1 or 2. Skips the test where none can be made."""
    version_2 = (HIERARCHY / "cgroup.controllers").exists()
    group = (HIERARCHY if version_2 else HIERARCHY / "cpu") / f"quota-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        if version_2:
            (group / "cpu.max").write_text(f"{round(100_000 * cpus)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * cpus)))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a CPU quota can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def main(settings: dict[str, Any]) -> None:
    """One rank."""
    import torch

    torch.set_num_threads(1)
    from slipstream.models.config import ModelConfig
    from slipstream.train.config import TrainingConfig
    from slipstream.train.run import run
    from slipstream.train.setup import TrainingRequest

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
    run(
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
    """As from a disk that takes so long for each batch."""
    from slipstream.train.data_loader import StoredRows

    gather = StoredRows.gather

    def slowly(self: StoredRows, rows: np.ndarray, out: np.ndarray) -> None:
        time.sleep(seconds * len(rows) / (BATCH // WORLD))
        gather(self, rows, out)

    StoredRows.gather = slowly  # type: ignore[method-assign]


def slow_backward(seconds: float) -> None:
    """More products of matrices in the backward pass of every step."""
    import torch

    from slipstream.train.telemetry.marks import StepMarks

    matrix = torch.ones(128, 128)
    began = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    each = (time.perf_counter() - began) / 200
    mark = StepMarks.backward_of

    def busy(gradient: torch.Tensor) -> None:
        for _ in range(round(seconds / each)):
            matrix @ matrix

    def watched(self: StepMarks, loss: torch.Tensor) -> None:
        mark(self, loss)
        loss.register_hook(busy)

    StepMarks.backward_of = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
