"""Worker processes: what they import, and how many threads they start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest
from threadpoolctl import threadpool_info

from slipstream.prepare.pool import Workers, importing_nothing_of


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers(2, __name__)) as workers:
        yield workers


def array_without_pandas(values: list[int]) -> tuple[list[int], bool]:
    return pa.array(values).to_pylist(), "pandas" in sys.modules


def threads_for_linear_algebra(_: int) -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def to_pandas(values: list[int]) -> tuple[str, int]:
    output = pa.array(values).to_pandas()
    return type(output).__name__, int(output.sum())


def test_a_worker_makes_arrays_without_importing_pandas(workers: Workers) -> None:
    assert list(workers.map(array_without_pandas, [[1, 2], [3]])) == [([1, 2], False), ([3], False)]


def test_a_worker_has_one_thread_for_linear_algebra(workers: Workers) -> None:
    assert list(workers.map(threads_for_linear_algebra, [0])) == [[1]]


def test_a_worker_that_needs_pandas_has_it(workers: Workers) -> None:
    assert list(workers.map(to_pandas, [[1, 2]])) == [("Series", 3)]


def test_a_package_seems_absent_within_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError, match="colorsys"), importing_nothing_of("colorsys"):
        __import__("colorsys")
    assert __import__("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
