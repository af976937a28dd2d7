"""Property tests of ``tests/prepare`` on new examples."""

import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.text import record_ends
from tests.support.arrow_columns import SUFFIXES, USES, columns, fuzz, outcome
from tests.support.csv_text import blocks_against_csv

#: For CSV against Python's csv module.
SECONDS = 30.0
LONG = settings(fuzz(500), derandomize=False)


@pytest.mark.prove
def test_csv_has_the_rows_of_the_csv_module(tmp_path: Path) -> None:
    first, ends, tables = time.time_ns() // 1000, time.monotonic() + SECONDS, 0
    while time.monotonic() < ends:
        draw = random.Random(first + tables)
        config = DataConfig(escape=draw.choice(["", "\\"]), encoding=draw.choice(["utf-8", "utf-8-sig"]))
        with mock.patch.object(record_ends, "LOOK_BYTES", draw.choice([5, 100, 64 << 10])):
            try:
                blocks_against_csv(draw, tmp_path / "t.csv", config, draw.choice(["\n", "\r\n", "\r"]))
            except Exception as error:
                raise AssertionError(f"case {first + tables}: {type(error).__name__}: {error}") from error
        tables += 1
    print(f"\n{tables} tables, from case {first} on")
    assert tables > 100


@pytest.mark.prove
@LONG
@given(column=columns(), suffix=SUFFIXES, use=st.sampled_from([{}, *USES]))
def test_a_column_of_any_type_is_used_set_aside_or_refused(column: pa.Array, suffix: str, use: dict[str, Any]) -> None:
    outcome(column, suffix, quarantine_limit=1.0, **use)
