"""Whatever Arrow can hold: it is prepared, or the column is set aside with a word, or there is one clear line."""

from __future__ import annotations

import tempfile
import typing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.errors import UserError
from slipstream.prepare.config import ColumnType, DataConfig
from slipstream.prepare.engine import prepare
from tests.support.arrow_columns import ROWS, SUFFIXES, UNIONS, columns, fuzz, made, write_table_with


def outcome(column: pa.Array, suffix: str, target: bool = False, **config: object) -> str:
    """ "refused", "used", "warned" (set aside with a warning) or "apart" (as asked for); what is prepared is whole."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"t{suffix}"
        write_table_with(column, path)
        try:
            prepare(Path(directory) / "p", str(path), "c" if target else "y", DataConfig.from_dict(config), {})
        except UserError as error:
            assert "\n" not in error.message
            return "refused"
        data = PreparedData.open(Path(directory) / "p")
        counted = data.card["rows"]
        assert counted["read"] == counted["kept"] + counted["quarantined"] == ROWS
        for split in SPLITS:
            records = data.split(split)
            for name in data.signature.record.names or ():
                assert np.isfinite(records[name].astype(float)).all()
        column_card = next(column for column in data.card["columns"] if column["name"] == "c")
        warned = any("'c' is set aside: " in warning for warning in data.card["warnings"])
        used = column_card["role"] in ("numeric", "categorical", "document", "target")
        assert warned == ("why" in column_card) and not (warned and used)
        return "used" if used else "warned" if warned else "apart"


FUZZ = fuzz(60)


@FUZZ
@given(column=columns(), suffix=SUFFIXES)
@example(column=pa.array([2**63 + n for n in range(ROWS)], pa.uint64()), suffix=".parquet")
@example(column=pa.array([2**64 - 1, 2**63] * (ROWS // 2), pa.uint64()), suffix=".arrow")
@example(column=pa.array([[1, 2]] * ROWS), suffix=".parquet")
@example(column=pa.nulls(ROWS), suffix=".parquet")
@example(column=made(UNIONS[0], [(0, 1), (1, "a"), (1, None)] * (ROWS // 3)), suffix=".arrow")
@example(column=made(UNIONS[1], [(0, 1), (1, "a"), (1, None)] * (ROWS // 3)), suffix=".arrow")
@example(column=pa.array([Decimal(1000 * n) for n in range(ROWS)], pa.decimal128(9, -3)), suffix=".arrow")
def test_a_column_of_any_type(column: pa.Array, suffix: str) -> None:
    assert outcome(column, suffix, quarantine_limit=1.0) in ("refused", "used", "warned")


@FUZZ
@given(column=columns(), suffix=SUFFIXES, task=st.sampled_from(["auto", "classification", "regression"]))
def test_a_target_of_any_type(column: pa.Array, suffix: str, task: str) -> None:
    outcome(column, suffix, target=True, quarantine_limit=1.0, task=task)


USES = [{"drop": ["c"]}, *({use: "c"} for use in ("id", "group", "time", "weight"))]
USES += [{"types": {"c": kind}} for kind in typing.get_args(ColumnType)]


@FUZZ
@given(column=columns(), suffix=SUFFIXES, use=st.sampled_from(USES))
def test_any_use_of_a_column_of_any_type(column: pa.Array, suffix: str, use: dict[str, Any]) -> None:
    outcome(column, suffix, quarantine_limit=1.0, **use)
