"""Training runs of real processes that can be killed at named moments, a tenth of a second apart.

The fork server with torch loaded stands in for the start of an interpreter; the harness plays the agent: when a rank
dies, the others die with it and the next attempt begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import multiprocessing.process
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from slipstream.artifacts.homes import Holder
from slipstream.artifacts.results.training import ValidationPoint
from slipstream.models.config import ModelConfig
from slipstream.storage import storage_for
from slipstream.train.checkpoint.home import CHECKPOINTS, complete
from tests.support.forked import may_have_children
from tests.support.processes import FORK, free_port

ATTEMPT_S = 90
ALL = -1


@dataclass(frozen=True)
class Fault:
    """What goes wrong: at the ``at``-th time (from 1) that ``where`` is passed, on ``rank`` or on ALL."""

    where: str
    what: str = "SIGKILL"
    rank: int = 0
    at: int = 1


@dataclass(frozen=True)
class Job:
    """One training run. ``home`` of its checkpoints may be an ``s3://`` prefix."""

    prepared: Path
    place: Path
    world: int
    home: str
    steps: int = 24
    checkpoint_every: int = 3
    accumulation: int | Literal["auto"] = 1
    dropout: float = 0.2
    ema: float = 0.0
    #: More of the section training.
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: A factory, instead of the built-in model, and its arguments; or all settings of the model.
    factory: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: ModelConfig | None = None
    #: A trained model to learn from, too.
    teacher: Path | None = None
    #: Trained model that the training starts from: its weights, and its units if it was pruned.
    start: Path | None = None
    #: Steps (from 1) whose inputs become non-finite.
    poisoned: tuple[int, ...] = ()
    #: A peer that does not answer is given up after this long.
    patience_s: int = 8
    #: What SIGTERM leaves.
    grace_s: float = 25
    #: Who the attempts are, to each other.
    holder: Holder = Holder()
    #: With a number, every rank notes the rows of each step in ``rows-<number>-<rank>``.
    watched: int = 0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Evaluations after which ``on_evaluation`` stops rank 0; 0: never. Every call is recorded in ``told-<rank>``.
    stops_after: int = 0
    #: Seconds that each step takes longer; when each began is noted in ``times-<rank>``.
    step_s: float = 0.0
    #: The longest that an attempt may take.
    limit_s: float = ATTEMPT_S
    #: Other values of the constants of the lease.
    lease: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.place / "model"


def run_rank(job: Job, rank: int, port: int, faults: tuple[Fault, ...], fired: Path) -> None:
    """The body of one process of the fork server."""
    import torch

    from slipstream.models import factory
    from slipstream.train import run as engine
    from slipstream.train.checkpoint import lease
    from slipstream.train.checkpoint.manager import Checkpoints
    from slipstream.train.config import TrainingConfig
    from slipstream.train.loop import train_loop
    from slipstream.train.setup import TrainingRequest

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(job.environment)
    log = os.open(job.place / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    may_have_children()
    short = timedelta(seconds=job.patience_s)
    engine.process_group = functools.partial(engine.process_group, timeout=short)
    engine.Checkpoints = functools.partial(Checkpoints, timeout=short)  # type: ignore[misc,assignment]
    # Points of the history lie between checkpoints, so that a sum that is not kept shows.
    train_loop.HISTORY_POINTS = max(1, job.steps // 7)
    # Several batches to an evaluation, of three ranks not equally many for each.
    factory.MOST_ROWS = 13
    for name, value in job.lease.items():
        setattr(lease, name, value)
    if job.watched:
        note_rows(train_loop, job.place / f"rows-{job.watched}-{rank}")
    if job.step_s:
        slow_down(train_loop, job.step_s, job.place / f"times-{rank}")
    poison(train_loop, job.poisoned)
    for fault in faults:
        if fault.rank in (rank, ALL):
            install(fault, fired)
    network = ModelConfig("mlp", {"hidden": [48, 32, 24], "dropout": job.dropout})
    request = TrainingRequest(
        prepared=job.prepared,
        model=job.model or (ModelConfig(job.factory, job.arguments) if job.factory else network),
        training=TrainingConfig(
            epochs=max(1, job.steps // 8),
            batch_size=75,
            accumulation=job.accumulation,
            ema=job.ema,
            **job.training,
            checkpoint_every=job.checkpoint_every,
            evaluate_every=5,
            patience=0,
        ),
        directory=job.output,
        home=job.home,
        holder=job.holder,
        made_by={},
        grace_s=job.grace_s,
        teacher=job.teacher,
        start=job.start,
        told=functools.partial(tell, job, rank) if job.stops_after else None,
    )
    engine.run(request)


def tell(job: Job, rank: int, evaluations: Sequence[ValidationPoint]) -> bool:
    with (job.place / f"told-{rank}").open("a") as notes:
        notes.write(f"{len(evaluations)} {evaluations[-1].step} {evaluations[-1].loss!r}\n")
    return len(evaluations) >= job.stops_after


def note_rows(loop: Any, path: Path) -> None:
    """Note for each step which rows it takes. The first number of a row of the table is its own."""
    original = loop.train_step

    def wrapped(state: Any, config: Any, group: Any, precision: str, batch: Any, *more: Any) -> Any:
        with path.open("a") as file:
            file.write(json.dumps([state.progress.step, batch.inputs[0][: batch.rows, 0].tolist()]) + "\n")
        return original(state, config, group, precision, batch, *more)

    loop.train_step = wrapped


def slow_down(loop: Any, seconds: float, path: Path) -> None:
    """Make each step take ``seconds`` longer, and note when it began."""
    original = loop.train_step

    def wrapped(*arguments: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        time.sleep(seconds)
        return original(*arguments)

    loop.train_step = wrapped


def poison(loop: Any, steps: tuple[int, ...]) -> None:
    """Make the first input of these steps non-finite, whenever they are taken."""
    original = loop.train_step

    def wrapped(state: Any, config: Any, group: Any, precision: str, batch: Any, *more: Any) -> Any:
        if state.progress.step + 1 in steps:
            batch = batch._replace(inputs=(batch.inputs[0] * float("nan"), *batch.inputs[1:]))
        return original(state, config, group, precision, batch, *more)

    loop.train_step = wrapped


def install(fault: Fault, fired: Path) -> None:
    """Make ``fault`` happen in this process: wrap the function that is passed at that moment."""
    from slipstream.artifacts.format import MANIFEST, Artifact
    from slipstream.storage.local import LocalStorage
    from slipstream.train import data_loader as loader
    from slipstream.train.checkpoint import shards
    from slipstream.train.checkpoint.home import Home
    from slipstream.train.loop import evaluation, train_loop

    def strike(*_: Any) -> None:
        if fault.where == "data":
            time.sleep(1)  # until what was read ahead is used up and the rank waits
        with fired.open("a") as file:
            file.write(f"{fault.what}\n")
            file.flush()
            os.fsync(file.fileno())
        if fault.what == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), getattr(signal, fault.what))
        if fault.what in ("SIGTERM", "SIGSTOP") and fault.where != "data":
            return
        time.sleep(ATTEMPT_S)

    def before(holder: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        original, passed = getattr(holder, name), 0

        @functools.wraps(original)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal passed
            if when(*arguments):
                passed += 1
                if passed == fault.at:
                    strike()
            return original(*arguments, **named)

        setattr(holder, name, wrapped)

    def put(suffix: str) -> None:
        from slipstream.storage.s3 import S3Storage

        for storage in (LocalStorage, S3Storage):
            before(storage, "put", lambda _self, key, *_: suffix in key)

    if fault.where == "begin":
        strike()
    elif fault.where == "inherit":
        before(Home, "inherit")
    elif fault.where == "step":
        before(train_loop, "train_step")
    elif fault.where == "data":
        loader.BUFFER_BATCHES = 1  # it counts batches
        before(loader.StoredRows, "gather")
    elif fault.where == "evaluation":
        before(evaluation, "evaluate_split")
    elif fault.where == "write":
        before(Path, "open", lambda path, mode="r", *_: path.name.startswith("tensors") and mode == "xb")
    elif fault.where == "mid-write":
        half_written(shards.FileWriter, fault.at, strike)
    elif fault.where == "upload":
        put("tensors-")
    elif fault.where == "manifest":
        put(MANIFEST)
    elif fault.where == "latest":
        put("latest.json")
    elif fault.where == "retire":
        before(LocalStorage, "delete", lambda _self, keys: isinstance(keys, list) and len(keys) > 1)
    elif fault.where == "restore":
        before(Artifact, "check_sha256")
    elif fault.where == "load":
        before(shards.ShardReader, "read_data")
    else:
        raise ValueError(fault.where)


def half_written(writer: Any, at: int, strike: Callable[[], None]) -> None:
    original, passed = writer.write, 0

    def wrapped(self: Any, name: str, chunks: Any) -> None:
        nonlocal passed
        passed += name.startswith("tensors")
        if passed == at and name.startswith("tensors"):
            data = b"".join(bytes(chunk) for chunk in chunks)
            (self.directory / name).write_bytes(data[: len(data) // 2])
            strike()
        original(self, name, chunks)

    writer.write = wrapped


@dataclass(frozen=True)
class Attempt:
    """How one attempt ended; ``struck`` names what went wrong in it, once for each rank that it hit."""

    finished: bool
    struck: tuple[str, ...]
    seconds: float

    @property
    def fired(self) -> int:
        return len(self.struck)


@dataclass(frozen=True)
class Running:
    """An attempt that was begun."""

    job: Job
    faults: tuple[Fault, ...]
    fired: Path
    ranks: list[multiprocessing.process.BaseProcess]
    started: float

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that still live."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def finish(self) -> Attempt:
        """Wait until all ranks are done, or one died and the others were ended like by their agent."""
        try:
            finished = wait(self.ranks, self.job.limit_s)
        finally:
            self.signal(signal.SIGKILL)
            for process in self.ranks:
                process.join()
        struck = tuple(self.fired.read_text().splitlines()) if self.fired.exists() else ()
        return Attempt(finished, struck, time.perf_counter() - self.started)


def begin(job: Job, *faults: Fault) -> Running:
    """Start the ranks."""
    job.place.mkdir(parents=True, exist_ok=True)
    fired = job.place / "fired"
    fired.unlink(missing_ok=True)
    started = time.perf_counter()
    port = free_port()
    arguments = [(job, rank, port, faults, fired) for rank in range(job.world)]
    ranks: list[multiprocessing.process.BaseProcess] = [
        FORK.Process(target=run_rank, args=a, daemon=True) for a in arguments
    ]
    for process in ranks:
        process.start()
    return Running(job, faults, fired, ranks, started)


def attempt(job: Job, *faults: Fault) -> Attempt:
    """Run the ranks until all are done, or one died and the others were ended like by their agent."""
    return begin(job, *faults).finish()


def wait(ranks: list[multiprocessing.process.BaseProcess], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if all(code == 0 for code in codes):
            return True
        if any(code not in (None, 0) for code in codes):
            # A stopped rank is noticed by its peers only; all others leave of themselves.
            return False
        time.sleep(0.005)
    raise TimeoutError(f"an attempt took more than {limit_s} s")


def outcome(job: Job) -> dict[str, str]:
    """Return digests that must be equal after killed and undisturbed runs.

    The weights (last and best), the course of training, and from the newest checkpoint the optimiser, every rank's
    random generators and the position.
    """
    manifest = json.loads((job.output / "manifest.json").read_bytes())
    found = {
        name: manifest["files"][name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")
    }
    storage = storage_for(job.home)
    with tempfile.TemporaryDirectory() as temporary:

        def read(key: str) -> Any:
            return json.loads(storage.get(key, Path(temporary)).read_bytes())

        # Not by latest.json: a process that was killed just before it wrote that leaves an older one in it, and its
        # successor, with no step left to do, saves nothing.
        newest = str(complete(storage.list(CHECKPOINTS))[0])
        files = read(f"{newest}/manifest.json")["files"]
    return found | {f"{newest.split('.')[0]}/{name}": record["sha256"] for name, record in files.items()}
