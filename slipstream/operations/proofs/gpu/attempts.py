"""Attempts at a training by real processes, with faults at named moments.

A fork server with torch loaded starts the ranks in 0.1 s. Like torch's agent, this module ends all ranks if one dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import multiprocessing
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

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.checkpoint.home import CHECKPOINTS, complete_checkpoints
from slipstream.shared.artifacts.results.training import ValidationPoint
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import storage_for

ATTEMPT_S = 90
ALL_RANKS = -1


@dataclass(frozen=True)
class InjectedFault:
    """Fault ``what`` at the ``at``-th time (from 1) that ``rank``, or every rank with ALL_RANKS, passes ``where``."""

    where: str
    what: str = "SIGKILL"
    rank: int = 0
    at: int = 1


@dataclass(frozen=True)
class TrainingJob:
    """Training of ``world`` ranks. ``home``, its checkpoint directory, may be an ``s3://`` prefix."""

    prepared: Path
    place: Path
    world: int
    home: str
    steps: int = 24
    checkpoint_every: int = 3
    accumulation: int | Literal["auto"] = 1
    dropout: float = 0.2
    ema: float = 0.0
    #: More settings of the section ``training``.
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Factory that replaces the built-in model, and its arguments; or all settings of the model.
    factory: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: ModelConfig | None = None
    #: Trained model to distil.
    teacher: Path | None = None
    #: Trained model that the training starts from: its weights, and its units if it was pruned.
    start: Path | None = None
    #: Steps (from 1) whose inputs become non-finite.
    poisoned: tuple[int, ...] = ()
    #: Seconds after which a peer that does not answer counts as lost.
    patience_s: int = 8
    #: Seconds between SIGTERM and SIGKILL.
    grace_s: float = 25
    #: Identity of the attempts in the lease of the checkpoint directory.
    holder: Holder = Holder()
    #: If not 0, every rank writes the rows of every step to ``rows-<number>-<rank>``.
    watched: int = 0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Evaluations after which ``on_evaluation`` stops rank 0; 0: never. Every call is recorded in ``told-<rank>``.
    stops_after: int = 0
    #: Seconds that every step takes longer; the start of every step is written to ``times-<rank>``.
    step_s: float = 0.0
    #: Maximum seconds of an attempt.
    limit_s: float = ATTEMPT_S
    #: Other values for constants of the lease.
    lease: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.place / "model"


def run_rank(job: TrainingJob, rank: int, port: int, faults: tuple[InjectedFault, ...], fired: Path) -> None:
    """Run one rank in a process of the fork server."""
    import torch

    from slipstream.pipeline.train import run as engine
    from slipstream.pipeline.train.checkpoint import lease
    from slipstream.pipeline.train.checkpoint.manager import Checkpoints
    from slipstream.pipeline.train.config import TrainingConfig
    from slipstream.pipeline.train.loop import train_loop
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.shared.models import factory

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
    # Points of the history lie between checkpoints, so that a sum that is not saved shows.
    train_loop.HISTORY_POINTS = max(1, job.steps // 7)
    # An evaluation takes several batches, and three ranks have different numbers of batches.
    factory.MOST_ROWS = 13
    for name, value in job.lease.items():
        setattr(lease, name, value)
    if job.watched:
        note_rows(train_loop, job.place / f"rows-{job.watched}-{rank}")
    if job.step_s:
        slow_down(train_loop, job.step_s, job.place / f"times-{rank}")
    poison(train_loop, job.poisoned)
    for fault in faults:
        if fault.rank in (rank, ALL_RANKS):
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
    engine.run_attempt(request)


def may_have_children() -> None:
    """Allow this process to have children, as ranks of torch's agents may, which trace in some; daemons may not."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def tell(job: TrainingJob, rank: int, evaluations: Sequence[ValidationPoint]) -> bool:
    with (job.place / f"told-{rank}").open("a", encoding="utf-8") as notes:
        notes.write(f"{len(evaluations)} {evaluations[-1].step} {evaluations[-1].loss!r}\n")
    return len(evaluations) >= job.stops_after


def note_rows(loop: Any, path: Path) -> None:
    """Write the rows of every step to a file, by their first number."""
    original = loop.train_step

    def wrapped(state: Any, config: Any, group: Any, precision: str, batch: Any, *more: Any) -> Any:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([state.progress.step, batch.inputs[0][: batch.rows, 0].tolist()]) + "\n")
        return original(state, config, group, precision, batch, *more)

    loop.train_step = wrapped


def slow_down(loop: Any, seconds: float, path: Path) -> None:
    """Make every step take ``seconds`` longer, and write the time at which it started."""
    original = loop.train_step

    def wrapped(*arguments: Any) -> Any:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.time()}\n")
        time.sleep(seconds)
        return original(*arguments)

    loop.train_step = wrapped


def poison(loop: Any, steps: tuple[int, ...]) -> None:
    """Make the first input of these steps non-finite in every attempt."""
    original = loop.train_step

    def wrapped(state: Any, config: Any, group: Any, precision: str, batch: Any, *more: Any) -> Any:
        if state.progress.step + 1 in steps:
            batch = batch._replace(inputs=(batch.inputs[0] * float("nan"), *batch.inputs[1:]))
        return original(state, config, group, precision, batch, *more)

    loop.train_step = wrapped


def install(fault: InjectedFault, fired: Path) -> None:
    """Inject ``fault`` into this process: wrap the function that runs at that moment."""
    from slipstream.pipeline.train import data_loader as loader
    from slipstream.pipeline.train.checkpoint import shards
    from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
    from slipstream.pipeline.train.loop import evaluation, train_loop
    from slipstream.shared.artifacts.format import MANIFEST, Artifact
    from slipstream.shared.storage.local import LocalStorage

    def strike(*_: Any) -> None:
        if fault.where == "data":
            time.sleep(1)  # until the rank has used the batches that were read ahead, and waits
        with fired.open("a", encoding="utf-8") as file:
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
        from slipstream.shared.storage.s3 import S3Storage

        for storage in (LocalStorage, S3Storage):
            before(storage, "put", lambda _self, key, *_: suffix in key)

    if fault.where == "begin":
        strike()
    elif fault.where == "inherit":
        before(CheckpointDirectory, "inherit")
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
class EndedAttempt:
    """End of an attempt. ``struck`` holds the fault once for every affected rank."""

    finished: bool
    struck: tuple[str, ...]
    seconds: float

    @property
    def fired(self) -> int:
        return len(self.struck)


@dataclass(frozen=True)
class RunningAttempt:
    """Attempt that has started."""

    job: TrainingJob
    faults: tuple[InjectedFault, ...]
    fired: Path
    ranks: list[multiprocessing.process.BaseProcess]
    started: float

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that still run."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def finish(self) -> EndedAttempt:
        """Wait until all ranks are done, or one has died and the others were killed."""
        try:
            finished = wait(self.ranks, self.job.limit_s)
        finally:
            self.signal(signal.SIGKILL)
            for process in self.ranks:
                process.join()
        struck = tuple(self.fired.read_text(encoding="utf-8").splitlines()) if self.fired.exists() else ()
        return EndedAttempt(finished, struck, time.perf_counter() - self.started)


def start_attempt(job: TrainingJob, *faults: InjectedFault) -> RunningAttempt:
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
    return RunningAttempt(job, faults, fired, ranks, started)


def run_attempt(job: TrainingJob, *faults: InjectedFault) -> EndedAttempt:
    """Start the ranks and wait for their end."""
    return start_attempt(job, *faults).finish()


def wait(ranks: list[multiprocessing.process.BaseProcess], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if all(code == 0 for code in codes):
            return True
        if any(code not in (None, 0) for code in codes):
            # Only its peers notice a stopped rank; they exit by themselves.
            return False
        time.sleep(0.005)
    raise TimeoutError(f"an attempt took more than {limit_s} s")


def result_digests(job: TrainingJob) -> dict[str, str]:
    """Return digests of the results, which must not depend on faults.

    Weights (last and best), history, and from the newest checkpoint the optimiser's state, every rank's random
    generators and the position.
    """
    manifest = json.loads((job.output / "manifest.json").read_bytes())
    found = {
        name: manifest["files"][name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")
    }
    storage = storage_for(job.home)
    with tempfile.TemporaryDirectory() as temporary:

        def read(key: str) -> Any:
            return json.loads(storage.get(key, Path(temporary)).read_bytes())

        # latest.json may name an older checkpoint: if a process is killed just before it writes that file, and no step
        # is left, its successor saves nothing.
        newest = str(complete_checkpoints(storage.list(CHECKPOINTS))[0])
        files = read(f"{newest}/manifest.json")["files"]
    return found | {f"{newest.split('.')[0]}/{name}": record["sha256"] for name, record in files.items()}


def end_of_log(job: TrainingJob) -> str:
    """Return the last characters of rank 0's output."""
    return (job.place / "log-0").read_text(encoding="utf-8", errors="replace")[-500:]
