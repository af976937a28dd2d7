"""Records of finished work on disk, from which an interrupted prepare resumes.

A unit of work is a function call. Its record is trusted only if intact: it starts with its own SHA-256, appears by a
rename, and holds a digest of every file that the unit wrote. So no write order or fsync is needed; work damaged by a
crash of the machine is repeated. Records hold a value of the function's annotated return type instead of a pickle, so a
writer to the directory cannot run code here.

Units are identified by function name and number, so a directory belongs to one input, configuration and code version.
:meth:`ResumableScratch.bind` ties it to the input, because a file may have had other content when a killed run read it.
"""

from __future__ import annotations

import hashlib
import shutil
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import xxhash

from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.typed_values import decode_value, encode_value
from slipstream.shared.distributed.pool import WorkerLost, WorkerPool
from slipstream.shared.errors import UserError
from slipstream.shared.storage.local import out_of_space, sync_to_disk

Job = TypeVar("Job")
Result = TypeVar("Result")

RECORD = ".done"
#: File with a description of the inputs that all records in the directory come from.
BINDING = "made-from.json"
PARTIAL = ".partial"
#: Length of a SHA-256 in bytes and in hexadecimal digits.
SHA256_BYTES, SHA256_DIGITS = 32, 64


@dataclass(frozen=True)
class UnitOfWork(Generic[Job, Result]):
    """Call ``work(job)`` with a record called ``name``.

    The result has the annotated return type of ``work``. If the unit writes files, its result lists their paths as
    ``files``, or maps paths to XXH3-128 or SHA-256 digests as ``digests``.
    """

    root: Path
    name: str
    work: Callable[[Job], Result]
    job: Job

    @property
    def record(self) -> Path:
        return self.root / f"{self.name}{RECORD}"

    @property
    def recorded(self) -> types.GenericAlias:
        """Type of the record: the result, and a digest by relative path for every file."""
        return types.GenericAlias(tuple, (typing.get_type_hints(self.work)["return"], dict[str, str]))


class ResumableScratch:
    """Directory in which ``workers`` run units of work, skipping those with a record."""

    def __init__(self, root: Path, workers: WorkerPool) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        #: Number of units with a record from an earlier run.
        self.done_before = len(list(root.glob(f"*{RECORD}")))
        self._workers = workers
        self._calls: Counter[str] = Counter()

    def bind(self, made_from: dict[str, object], keep: Collection[Path] = ()) -> None:
        """Bind the directory to ``made_from``; if it was not, delete everything in it but ``keep``."""
        binding, content = self.root / BINDING, canonical_json(made_from)
        if binding.is_file() and binding.read_bytes() == content:
            return
        for path in [path for path in self.root.iterdir() if path not in keep]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        sync_to_disk(self.root)  # a crash must not bring records back below the new binding
        partial = binding.with_suffix(PARTIAL)
        partial.write_bytes(content)
        partial.replace(binding)
        self.done_before = 0

    def map(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """Run ``work`` on every job by :meth:`WorkerPool.map`, restoring results of intact records."""
        return self._workers.map(run_or_restore, self._units(work, jobs))

    def _units(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[UnitOfWork[Job, Result]]:
        step = f"{work.__name__}-{self._calls[work.__name__]}"
        self._calls[work.__name__] += 1
        for number, job in enumerate(jobs):
            yield UnitOfWork(self.root, f"{step}-{number:06d}", work, job)


@contextmanager
def resumable_scratch(root: Path, workers: WorkerPool, *, lasting: bool = True) -> Iterator[ResumableScratch]:
    """Yield a scratch directory; remove it and close ``workers`` at the end.

    With ``lasting``, the directory of an interrupted run stays for the next run.
    """
    try:
        yield ResumableScratch(root, workers)
    except BaseException as error:
        if not lasting or not worth_resuming(error):
            workers.close()  # a running one would still leave its files in the directory being removed
            shutil.rmtree(root, ignore_errors=True)
        raise
    with ThreadPoolExecutor(1) as beside:
        # Processes take a while to free their memory, and files theirs.
        removed = beside.submit(shutil.rmtree, root)
        workers.close()
        removed.result()


def worth_resuming(error: BaseException) -> bool:
    """Return True unless a rerun would do other work, as after a user error, or the disk is full."""
    full = isinstance(error, Exception) and out_of_space(error)
    return isinstance(error, WorkerLost) or not (full or isinstance(error, UserError))


def run_or_restore(unit: UnitOfWork[Job, Result]) -> Result:
    """Return the result of a unit from its record, or run and record it; called in a worker process.

    Raises ``DamagedArtifact`` for an intact record of another type, which no crash can cause.
    """
    restored = restore_unit_result(unit)
    if restored is not None:
        return restored[0]
    result = unit.work(unit.job)
    write_record(unit, result)
    return result


def write_record(unit: UnitOfWork[Job, Result], result: Result) -> None:
    digests = getattr(result, "digests", {}) or {file: file_digest(Path(file)) for file in getattr(result, "files", ())}
    files = {str(Path(file).relative_to(unit.root)): recorded for file, recorded in digests.items()}
    content = encode_value((result, files), unit.recorded)
    partial = unit.record.with_suffix(PARTIAL)
    partial.write_bytes(hashlib.sha256(content).digest() + content)
    partial.replace(unit.record)


def restore_unit_result(unit: UnitOfWork[Job, Result]) -> tuple[Result] | None:
    """Return a unit's recorded result as a 1-tuple, or None if the record or one of its files is missing or damaged."""
    try:
        raw = unit.record.read_bytes()
        sha256, content = raw[:SHA256_BYTES], raw[SHA256_BYTES:]
        if hashlib.sha256(content).digest() != sha256:
            return None
        result, files = decode_value(content, unit.recorded, unit.record)
        whole = all(file_digest(unit.root / name, recorded) == recorded for name, recorded in files.items())
    except FileNotFoundError:
        return None
    return (result,) if whole else None


def file_digest(file: Path, like: str = "") -> str:
    """Return the digest (hex) of a file: SHA-256 if ``like`` is one, else XXH3-128."""
    with file.open("rb") as stream:
        return hashlib.file_digest(
            stream, hashlib.sha256 if len(like) == SHA256_DIGITS else xxhash.xxh3_128
        ).hexdigest()
