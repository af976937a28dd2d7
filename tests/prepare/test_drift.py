"""Drift: none in random splits, and a shift of half a standard deviation is found."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.prepare.card import column_figures, column_warnings
from slipstream.pipeline.prepare.drift import drift_from
from slipstream.pipeline.prepare.fit.scan_result import SPLIT
from slipstream.pipeline.prepare.fit.splits import TRAIN
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.comparison.stability import DriftTest, drift_test, significant_drifts
from tests.support.tables import Prepare


def columns(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    """Numbers, with ties, with missing values, with long tails; texts, with rare values, almost all of them rare."""
    frequent = random.choice(["a", "b", "c", *(f"rare {n}" for n in range(30))], rows, p=[0.4, 0.2, 0.1, *[0.01] * 30])
    return {
        "normal": pa.array(random.normal(size=rows)),
        "ties": pa.array(np.round(random.normal(size=rows))),
        "few": pa.array(random.integers(0, 3, rows).astype(float)),
        "zeros": pa.array(random.exponential(size=rows) * (random.random(rows) < 0.2)),
        "missing": pa.array(np.where(random.random(rows) < 0.1, np.nan, random.normal(size=rows))),
        "lognormal": pa.array(np.exp(2 * random.normal(size=rows))),
        "rare texts": pa.array(frequent, mask=random.random(rows) < 0.03),
        "many texts": pa.array([f"{n}" for n in random.integers(0, rows, rows)]),
    }


def judged(table: dict[str, pa.Array], splits: np.ndarray) -> list[str]:
    """The warnings, of columns as the card's."""
    types = {name: "text" if pa.types.is_string(values.type) else "number" for name, values in table.items()}
    target = {"y": pa.array(np.arange(len(splits)) % 7 * 1.0)}
    sample = pa.table({**table, **target, SPLIT: splits})
    figures = column_figures(sample, {**types, "y": "number"}, "y", ())
    return column_warnings([figures[name] for name in table])


def by_chance(random: np.random.Generator, rows: int) -> np.ndarray:
    shares = [0.7 if split == TRAIN else 0.15 for split in range(len(SPLITS))]
    return random.choice(len(SPLITS), rows, p=shares).astype(np.int8)


def clean_tables_that_warn(rows: int, tables: int) -> int:
    warned = 0
    for seed in range(tables):
        random = np.random.default_rng(seed)
        warned += bool(judged(columns(random, rows), by_chance(random, rows)))
    return warned


def test_one_of_twenty_clean_tables_warns_at_most() -> None:
    """1 of 100 is meant; without a look at how many rows there are all 20 warned."""
    assert clean_tables_that_warn(400, 20) <= 1


@pytest.mark.prove
@pytest.mark.parametrize("rows", [400, 1000, 5000])
def test_one_of_a_hundred_clean_tables_warns_at_most(rows: int) -> None:
    """1 % is meant; three standard errors of 1,000 tables are 0.95 %."""
    assert clean_tables_that_warn(rows, 1000) <= 20


def test_half_a_standard_deviation_is_found_in_400_rows_and_nothing_else_is() -> None:
    """Of 1,600 rows to learn from, and 400 that were shifted."""
    missed = others = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        splits = np.repeat([TRAIN, *(s for s in range(len(SPLITS)) if s != TRAIN)], [1600, 400, 400]).astype(np.int8)
        table = columns(random, 2400)
        shifted = table["normal"].to_numpy() + 0.5 * (splits != TRAIN)
        warnings = judged({**table, "normal": pa.array(shifted)}, splits)
        missed += 2 - sum("'normal'" in each for each in warnings)
        others += sum("'normal'" not in each for each in warnings)
    assert missed <= 1 and others <= 1


def test_a_clean_table_of_400_rows_is_prepared_without_a_warning(prepared: Prepare) -> None:
    table = pa.table({**columns(np.random.default_rng(0), 400), "y": np.arange(400) % 2})
    card = prepared(table).card
    assert not [warning for warning in card["warnings"] if "distributed differently" in warning]
    number = next(column for column in card["columns"] if column["name"] == "normal")
    assert set(number["drift"]) == set(number["drift_chance"]) == {"validation", "test"}


def test_many_rows_show_what_does_not_matter() -> None:
    """A class of 50 % that became one of 52 %: an index of 0.0016, beyond any chance."""
    seen = drift_test(np.array([500_000, 500_000]), np.array([520_000, 480_000]), ordered=True)
    assert seen.index == pytest.approx(0.04 * np.log(0.52 / 0.48) / 2, rel=1e-2) and seen.chance < 1e-6
    assert not significant_drifts({"it": seen})


def test_more_columns_need_a_smaller_chance() -> None:
    """0.002 is 0.2 % of a single column, and likely in ten of them."""
    seen = DriftTest(0.3, 0.002)
    assert significant_drifts({0: seen}) and not significant_drifts(dict.fromkeys(range(10), seen))


def test_a_column_of_few_values_has_none_outside_its_histogram() -> None:
    """No value lies in the outermost 1 %, so none is missing there among a million."""
    earlier = {"name": "x", "min": 0.0, "max": 1.0, "histogram": {"edges": [0.0, 0.5, 1.0], "counts": [500, 500]}}
    seen = drift_from(earlier, pa.table({"x": np.arange(100_000) % 2 * 1.0}))
    assert seen and seen.index < 1e-6 and seen.chance > 0.9


def test_one_bin_cannot_drift() -> None:
    assert drift_test(np.array([100]), np.array([60]), ordered=True).chance == 1.0
