"""Columns of any Arrow type and any values on the command line."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given

from tests.support.arrow_columns import ROWS, SUFFIXES, columns, fuzz, write_table_with
from tests.support.command_line import one_message, run_in


def check(column: pa.Array, suffix: str, target: str) -> None:
    """It is prepared, with a word on what was set aside, or refused in one message; and then nothing is left."""
    with tempfile.TemporaryDirectory() as directory:
        write_table_with(column, Path(directory) / f"t{suffix}")
        config = '{"data": {"quarantine_limit": 1.0}}'
        asked = ("--data", f"t{suffix}", "--target", target, "--config", config)
        ended = run_in(Path(directory), *asked, workflow="prepare")
        runs = list(Path(directory, "runs").glob("*"))
        if ended.returncode:
            assert one_message(ended.stdout) and not runs
            return
        assert f"{ROWS} rows read" in ended.stdout and len(runs) == 1
        assert (runs[0] / "card.html").stat().st_size and (runs[0] / "prepared/manifest.json").stat().st_size


@fuzz(4)
@given(column=columns(), suffix=SUFFIXES)
@example(column=pa.array([2**63 + n for n in range(ROWS)], pa.uint64()), suffix=".parquet")
@example(column=pa.array([[1, 2]] * ROWS), suffix=".parquet")
@example(column=pa.nulls(ROWS), suffix=".parquet")
def test_a_column_of_any_type(column: pa.Array, suffix: str) -> None:
    check(column, suffix, "y")


@fuzz(2)
@given(column=columns(), suffix=SUFFIXES)
def test_a_target_of_any_type(column: pa.Array, suffix: str) -> None:
    check(column, suffix, "c")


@pytest.mark.prove
@fuzz(60)
@given(column=columns(), suffix=SUFFIXES)
def test_many_columns_of_any_type(column: pa.Array, suffix: str) -> None:
    check(column, suffix, "y")
    check(column, suffix, "c")
