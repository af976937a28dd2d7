"""Worker processes: their imports and their number of threads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from threadpoolctl import threadpool_info

from slipstream.shared.distributed.pool import WorkerPool, imports_blocked
from tests.support import REPOSITORY


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    with closing(WorkerPool(2, __name__)) as workers:
        yield workers


def array_without_pandas(values: list[int]) -> tuple[list[int], bool]:
    return pa.array(values).to_pylist(), "pandas" in sys.modules


def threads_for_linear_algebra(_: int) -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def to_pandas(values: list[int]) -> tuple[str, int]:
    output = pa.array(values).to_pandas()
    return type(output).__name__, int(output.sum())


def test_a_worker_makes_arrays_without_importing_pandas(workers: WorkerPool) -> None:
    assert list(workers.map(array_without_pandas, [[1, 2], [3]])) == [([1, 2], False), ([3], False)]


def test_a_worker_has_one_thread_for_linear_algebra(workers: WorkerPool) -> None:
    assert list(workers.map(threads_for_linear_algebra, [0])) == [[1]]


def test_a_worker_that_needs_pandas_has_it(workers: WorkerPool) -> None:
    assert list(workers.map(to_pandas, [[1, 2]])) == [("Series", 3)]


def test_a_package_seems_absent_within_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError, match="colorsys"), imports_blocked("colorsys"):
        __import__("colorsys")
    assert __import__("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_workers_do_not_import_the_command_that_started_them(tmp_path: Path) -> None:
    """``pyflyte`` takes seconds to import."""
    command = tmp_path / "command.py"
    command.write_text(
        "from pathlib import Path\n"
        "with Path('imported').open('a') as file:\n"
        "    file.write('once ')\n"
        "from slipstream.shared.distributed.pool import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    workers = WorkerPool(2)\n"
        "    assert list(workers.map(abs, [-1, -2, -3])) == [1, 2, 3]\n"
        "    workers.close()\n"
    )
    subprocess.run(
        [sys.executable, command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True
    )
    assert (tmp_path / "imported").read_text() == "once "


def test_workers_keep_the_memory_that_arrow_frees_and_this_process_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "MIMALLOC_PURGE_DELAY"
    for value, expected in ((None, "-1"), ("50", "50")):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        with closing(WorkerPool(2)) as workers:
            assert os.environ.get(name) == value
            assert list(workers.map(os.getenv, [name] * 3)) == [expected] * 3
