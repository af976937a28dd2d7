"""Vectorised statistics equal those of single values, for every storage type."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.fit.moments import CodeOccurrences, ColumnMoments, column_moments
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.memory import MemoryBudget
from tests.support.tables import Prepare


def test_moments_of_many_columns_and_groups() -> None:
    draw = np.random.default_rng(0)
    numbers = draw.normal(1e6, 3, (40, 5000))
    numbers[::7, ::3] = np.nan
    numbers[5] = np.nan
    groups = draw.integers(0, 3, 5000)
    groups[:1000] = 1  # the first batch has no row of the other groups
    figures = ColumnMoments.nothing(40, 4)
    for start in range(0, 5000, 1000):
        here = slice(start, start + 1000)
        rows = [np.flatnonzero(groups[here] == group) for group in range(4)]
        figures = figures.merge(column_moments(list(numbers[:, here]), rows))
    for index, column in enumerate(numbers):
        for group, moments in enumerate(figures.of(index)):
            present = column[(groups == group) & ~np.isnan(column)]
            assert moments.count == len(present)
            if len(present):
                assert (moments.low, moments.high) == (present.min(), present.max())
                assert moments.mean == pytest.approx(present.mean(), rel=1e-12)
                assert moments.std == pytest.approx(present.std(), rel=1e-9)
            else:
                assert moments.std == 0 and moments.low == np.inf


def test_texts_are_counted_by_code() -> None:
    texts = pa.array([" a", "a", None, "b", "?", "a", "b"]).dictionary_encode()
    counts = CodeOccurrences.nothing(texts.dictionary, 2)
    counts.add(texts, [np.array([0, 1, 2]), np.array([3, 4, 5, 6])])
    names = value_types.clean_texts(texts.dictionary, ["?"])
    assert counts.present(names) == [2, 3]
    assert [counts.named(names, group) for group in (0, 1)] == [{"a": 2}, {"a": 1, "b": 2}]
    assert not counts.prose
    long = pa.array(["x" * 300, "y" * 300]).dictionary_encode()
    counts = CodeOccurrences.nothing(long.dictionary, 1)
    counts.add(long, [np.array([0, 1])])
    assert counts.prose


@pytest.mark.parametrize("stored", ["plain", "dictionary", "side by side", "large", "arrow"])
def test_however_texts_are_stored_the_rows_are_the_same(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    draw = np.random.default_rng(1)
    table = pa.table(
        {
            "x": draw.normal(size=2000),
            "t": pa.array(draw.choice(["a", " a", "b", "?", "c"], 2000), mask=draw.random(2000) < 0.1),
            "y": draw.choice(["p", "q"], 2000),
        }
    )
    expected = prepared(table, name="expected")
    path = tmp_path / "t.parquet"
    if stored == "large":
        table = table.set_column(1, "t", table["t"].cast(pa.large_string()))
    if stored == "arrow":
        path = tmp_path / "t.arrow"
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, use_dictionary=stored != "plain")
    if stored == "side by side":
        monkeypatch.setattr(MemoryBudget, "whole_group_bytes", 0)
    figures = prepared(path)
    for split in SPLITS:
        assert figures.split(split).tobytes() == expected.split(split).tobytes()
    assert figures.card["columns"] == expected.card["columns"]


def test_odd_spellings_of_numbers_among_plain_ones() -> None:
    texts = ["1", "-2.5", "3.", ".5", "+5", "1e3", "1e999", "inf", "-Infinity", "1_000", "0x1f", "x", " 7 ", "?", None]
    read, failed = value_types.convert_texts(pa.array(texts), value_types.NUMBER, ["?"])
    expected = pd.to_numeric(pd.Series([t and t.strip() for t in texts]), errors="coerce").to_numpy(float)
    np.testing.assert_array_equal(value_types.as_numbers(read), expected)
    wrong = [text for text, fails in zip(texts, failed, strict=True) if fails]
    assert wrong == [t for t, v in zip(texts, expected, strict=True) if np.isnan(v) and t not in ("?", None)]
