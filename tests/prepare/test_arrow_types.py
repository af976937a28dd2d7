"""Columns of any Arrow type are prepared, skipped with a warning, or refused in one line."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.arrow_columns import ROWS, SUFFIXES, UNIONS, USES, columns, fuzz, made, outcome

FUZZ = fuzz(25)


@FUZZ
@given(column=columns(), suffix=SUFFIXES)
@example(column=pa.array([2**63 + n for n in range(ROWS)], pa.uint64()), suffix=".parquet")
@example(column=pa.array([2**64 - 1, 2**63] * (ROWS // 2), pa.uint64()), suffix=".arrow")
@example(column=pa.array([[1, 2]] * ROWS), suffix=".parquet")
@example(column=pa.nulls(ROWS), suffix=".parquet")
@example(column=made(UNIONS[0], [(0, 1), (1, "a"), (1, None)] * (ROWS // 3)), suffix=".arrow")
@example(column=made(UNIONS[1], [(0, 1), (1, "a"), (1, None)] * (ROWS // 3)), suffix=".arrow")
@example(column=pa.array([Decimal(1000 * n) for n in range(ROWS)], pa.decimal128(9, -3)), suffix=".arrow")
@example(column=pa.array([0, 2**63 - 1, 0, 1, 0, 2] * (ROWS // 6), pa.timestamp("s", "UTC")), suffix=".arrow")
def test_a_column_of_any_type(column: pa.Array, suffix: str) -> None:
    assert outcome(column, suffix, quarantine_limit=1.0) in ("refused", "used", "warned")


@FUZZ
@given(column=columns(), suffix=SUFFIXES, task=st.sampled_from(["auto", "classification", "regression"]))
def test_a_target_of_any_type(column: pa.Array, suffix: str, task: str) -> None:
    outcome(column, suffix, target=True, quarantine_limit=1.0, task=task)


@pytest.mark.prove
@FUZZ
@given(column=columns(), suffix=SUFFIXES, use=st.sampled_from(USES))
def test_any_use_of_a_column_of_any_type(column: pa.Array, suffix: str, use: dict[str, Any]) -> None:
    outcome(column, suffix, quarantine_limit=1.0, **use)
