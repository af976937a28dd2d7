"""Worker pool: the same function on any number of processes, with results in the order of the jobs.

Jobs and results are pickled only between a process and its own children.
"""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import TypeVar

import pyarrow as pa

from slipstream.shared.distributed.child_processes import end_with_parent, no_main_module
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import memory_allowed, usable_cores

Job = TypeVar("Job")
Result = TypeVar("Result")

#: Environment variables for workers, read by libraries at their start. By default the allocators of Arrow and of glibc
#: (for NumPy) return a batch's memory to the system, which clears the same pages for the next batch: half of the page
#: faults of data preparation are glibc's. And every process would start a linear-algebra thread per core, and all
#: these threads would compete with the workers.
FOR_LIBRARIES = {
    "OPENBLAS_NUM_THREADS": "1",
    "MIMALLOC_PURGE_DELAY": "-1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}


class WorkerLost(UserError):
    """Raised if a worker process was killed; results yielded so far are valid."""


def initialise_worker(parent: int, module: str) -> None:
    """Initialise a worker process: end with the ``parent``, and import ``module`` before the first job."""
    end_with_parent(parent)
    importlib.import_module(module)
    # Arrow imports pandas with its first array, in case it receives pandas data: 340 modules and half a second in every
    # process. If the import fails, Arrow works without pandas until it must make something for pandas.
    with imports_blocked("pandas"):
        pa.array([0])
    # Imported objects are never freed, so garbage collection need not visit them.
    gc.freeze()


@contextmanager
def imports_blocked(package: str) -> Iterator[None]:
    """Make importing ``package`` fail within the block, unless it is already imported."""
    absent = AbsentPackage(package)
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)


@dataclass(frozen=True)
class AbsentPackage(MetaPathFinder):
    """Import finder that reports the ``package`` as not installed."""

    package: str

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == self.package:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def variables_for_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started in the block, except those that the user has set."""
    unset = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


class WorkerPool:
    """Pool of ``count`` processes that live until :meth:`close`; if ``count`` is 1, this process works.

    They start at once and import ``module`` (full name), which defines the functions.
    """

    def __init__(self, count: int, module: str = __name__) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            # Spawned, not forked: PyArrow and torch keep threads and locks that a fork would break.
            spawned = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, spawned, initialise_worker, (os.getpid(), module))
            with variables_for_children(FOR_LIBRARIES), no_main_module():
                for _ in range(count):
                    # Makes the pool start all workers now, while this process examines the data.
                    self._pool.submit(os.getpid)

    def map(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield results in the order of the jobs, with at most ``count + 1`` jobs in flight to limit memory."""
        if self._pool is None:
            yield from map(work, jobs)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(self._pool.submit(work, job))
                if len(waiting) > self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise WorkerLost(
                "data: a worker process was killed, probably because memory ran out; give the machine more memory, "
                "or the run fewer processes"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


#: Bytes of data up to which one process finishes before others have started.
WORTH_SPREADING = 256 << 20
#: Fraction of the memory limit for the processes' data; the remainder is for their code and the system.
FOR_DATA = 0.8


def workers_for(size: int, memory: float) -> int:
    """Return the number of processes worth starting for ``size`` bytes of data.

    It is 1 for little data, else the number of cores, or fewer if memory is limited: each may take ``memory`` GiB.
    Raises ``UserError`` if not even one process fits.
    """
    if size <= WORTH_SPREADING:
        return 1
    cores, allowed = usable_cores(), memory_allowed()
    if allowed is None:
        return cores
    gib = allowed / (1 << 30)
    fitting = int(FOR_DATA * gib / memory)
    if fitting == 0:
        raise UserError(
            f"data.memory: {memory:g} GiB are more than {FOR_DATA:.0%} of the {gib:.3g} GiB of this pod or container; "
            f"lower it to {math.floor(100 * FOR_DATA * gib) / 100}, or raise memory in the profile"
        )
    return min(cores, fitting)
