"""Finished units of work, kept on disk: an interrupted prepare goes on where it stopped.

A unit of work is a function and its job. Its result is kept in a record, which is believed only if it is whole: it
begins with its own SHA-256, it is written beside its place and renamed, and it holds a digest of every file that the
unit left. So nothing has to reach the disk in any order, and what a crash of the machine tore is done again.

A workplace belongs to one input, one configuration and one version of the code, because a unit is known by its place
in the work alone.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from tasks.errors import UserError
from tasks.preprocess.pool.workers import WorkerLost, Workers

Job = TypeVar("Job")
Result = TypeVar("Result")

RECORD = ".done"
PARTIAL = ".partial"
PIECE_BYTES = 8 << 20
SHA256_LENGTH = 64


@dataclass(frozen=True)
class UnitOfWork:
    """``work(job)``, whose record is called ``name``.

    A result with files lists their paths as ``files``, or, if it took their ``digests`` on the way, has these by path:
    XXH3-128 or SHA-256.
    """

    root: Path
    name: str
    work: Callable[[Any], Any]
    job: Any

    @property
    def record(self) -> Path:
        return self.root / f"{self.name}{RECORD}"


class Workplace:
    """A directory in which units of work are done by ``workers``, each of them once."""

    def __init__(self, root: Path, workers: Workers) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        #: How many units were done before.
        self.found = len(list(root.glob(f"*{RECORD}")))
        self._workers = workers
        self._calls: Counter[str] = Counter()

    def map(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """:meth:`Workers.map`, except that a unit whose record is whole is not done again."""
        return self._workers.map(finished, self._units(work, jobs))

    def _units(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[UnitOfWork]:
        step = f"{work.__name__}-{self._calls[work.__name__]}"
        self._calls[work.__name__] += 1
        for number, job in enumerate(jobs):
            yield UnitOfWork(self.root, f"{step}-{number:06d}", work, job)


@contextmanager
def workplace(root: Path, workers: Workers, *, lasting: bool = True) -> Iterator[Workplace]:
    """A workplace, which is gone at the end; but left for another attempt if it is ``lasting`` and was cut off."""
    try:
        yield Workplace(root, workers)
    except BaseException as error:
        if not lasting or not worth_going_on(error):
            shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root)


def worth_going_on(error: BaseException) -> bool:
    """Not if the user has to mend something, because that will be other work, nor if the disk is full."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return isinstance(error, WorkerLost) or not (full or isinstance(error, UserError))


def finished(unit: UnitOfWork) -> Any:
    """The result of a unit: as it was kept, or else made now, and kept. Runs in a worker process."""
    kept = recall(unit)
    if kept is not None:
        return kept[0]
    result = unit.work(unit.job)
    keep(unit, result)
    return result


def keep(unit: UnitOfWork, result: Any) -> None:
    digests = getattr(result, "digests", {}) or {file: digest(Path(file)) for file in getattr(result, "files", ())}
    files = {str(Path(file).relative_to(unit.root)): known for file, known in digests.items()}
    content = pickle.dumps((result, files), pickle.HIGHEST_PROTOCOL)
    partial = unit.record.with_suffix(PARTIAL)
    partial.write_bytes(hashlib.sha256(content).digest() + content)
    partial.replace(unit.record)


def recall(unit: UnitOfWork) -> tuple[Any] | None:
    """The result of a unit that was done before and is still whole."""
    try:
        raw = memoryview(unit.record.read_bytes())
        sha256, content = raw[:32], raw[32:]
        if hashlib.sha256(content).digest() != sha256:
            return None
        result, files = pickle.loads(content)
        whole = all(digest(unit.root / name, known) == known for name, known in files.items())
    except FileNotFoundError:
        return None
    return (result,) if whole else None


def digest(file: Path, like: str = "") -> str:
    """The XXH3-128 of a file (hex), or its SHA-256 if ``like`` is as long as one."""
    found = hashlib.sha256() if len(like) == SHA256_LENGTH else xxhash.xxh3_128()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()
