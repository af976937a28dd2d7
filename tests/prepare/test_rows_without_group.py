"""Rows without a group or id are split as if the setting were absent, and uneven splits are reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.assemble import holdout_rule
from slipstream.pipeline.prepare.fit.splits import SplitRule
from slipstream.pipeline.promote.comparison import Incomparable, check_unseen
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from tests.support.formats import FORMATS, prepare_as
from tests.support.proving import first_few
from tests.support.shares import on_several
from tests.support.tables import Prepare, vouch_for
from tests.support.wording import refuses

ROWS = 2000


def table(lacking: float, with_id: float = 1.0) -> dict[str, pa.Array]:
    """Rows of 400 customers; a share of them lacks the customer, and some the order's number."""
    draw = np.random.default_rng(4)
    group = [
        None if gap else f"c{n}"
        for gap, n in zip(draw.random(ROWS) < lacking, draw.integers(0, 400, ROWS), strict=True)
    ]
    order = [None if gap else f"o{n}" for n, gap in enumerate(draw.random(ROWS) >= with_id)]
    return {
        "customer": pa.array(group, pa.string()),
        "order": pa.array(order, pa.string()),
        "x": pa.array(np.round(draw.normal(size=ROWS), 4)),
        "y": pa.array(draw.choice(["no", "yes"], ROWS)),
    }


def split_of_rows(data: PreparedData) -> dict[float, str]:
    """Return the split of every row by its value of ``x``, rounded as it was drawn."""
    scaled = next(column for column in data.card["columns"] if column["name"] == "x")
    return {
        round(float(value) * scaled["std"] + scaled["mean"], 4): split
        for split in SPLITS
        for value in data.split(split)["numeric"][:, 0].astype(np.float64)
    }


@pytest.mark.parametrize("format", first_few(FORMATS, 2))
def test_a_row_without_a_group_has_the_split_that_it_has_without_the_setting(format: str, tmp_path: Path) -> None:
    columns = table(lacking=0.37)
    gaps = columns["customer"].is_null().to_pylist()
    whole, grouped, content = (
        split_of_rows(prepare_as(format, tmp_path / name, columns, **settings))
        for name, settings in {"a": {"group": "customer"}, "b": {"group": "customer", "id": "order"}, "c": {}}.items()
    )
    by_id = split_of_rows(prepare_as(format, tmp_path / "d", columns, id="order"))
    once = [value for value, count in zip(*np.unique(columns["x"], return_counts=True), strict=True) if count == 1]
    lacks = dict(zip(columns["x"].to_pylist(), gaps, strict=True))
    for value in once:
        assert grouped[value] == (by_id[value] if lacks[value] else whole[value])
        if lacks[value]:
            assert whole[value] == content[value]
    shares = [list(whole.values()).count(split) / len(whole) for split in SPLITS]
    assert shares == pytest.approx([0.7, 0.15, 0.15], abs=0.04)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_they_are_counted_and_the_same_on_several_pods(format: str, tmp_path: Path) -> None:
    columns = table(lacking=0.3, with_id=0.5)
    config = DataConfig(group="customer", id="order")
    one = prepare_as(format, tmp_path / "one", columns, group="customer", id="order")
    order = columns["order"].filter(columns["customer"].is_null())
    gaps = [f"{count:,} of 2,000 rows" for count in (len(order), order.null_count)]
    warned = [word for word in one.card["warnings"] if word.startswith("data")]
    assert [gap in word for gap, word in zip(gaps, warned, strict=True)] == [True, True]
    (source,) = (path for path in (tmp_path / "one").iterdir() if path.suffix == f".{format}")
    several = PreparedData.open(on_several(tmp_path / "pods", str(source), 2, config).directory)
    assert [several.split(split).tobytes() for split in SPLITS] == [one.split(split).tobytes() for split in SPLITS]
    assert several.card["warnings"] == one.card["warnings"]


def test_a_value_that_stands_for_none_is_reported_by_the_share_of_its_split(prepared: Prepare) -> None:
    columns = table(lacking=0.5)
    columns["customer"] = columns["customer"].fill_null("unknown")
    warned = [word for word in prepared(pa.table(columns), group="customer").card["warnings"] if "data.split" in word]
    assert warned and all("were asked for" in word for word in warned)


@pytest.mark.parametrize("rows", first_few([24, 60, 400], 1))
def test_small_tables_are_uneven_by_chance(prepared: Prepare, rows: int) -> None:
    """No warning under twenty seeds, although shares differ by more than a fifth."""
    draw, uneven = np.random.default_rng(0), 0
    numbers = pa.table({"x": draw.normal(size=rows), "y": draw.choice(["a", "b"], rows)})
    for seed in range(20):
        try:
            data = prepared(numbers, split={"seed": seed})
        except UserError:
            continue  # a split without rows
        uneven += any(abs(data.card["rows"][split] / rows - 0.15) > 0.03 for split in SPLITS[1:])
        assert not any("data.split" in word for word in data.card["warnings"])
    assert uneven


def test_few_groups_are_uneven_by_chance() -> None:
    sample = pa.table({"g": [0.0] * 500 + [1.0] * 500, "y": ["a", "b"] * 500})
    rule = SplitRule(DataConfig(group="g"), ["g", "y"], None)
    assert rule.warnings([500, 500, 0], [0], sample) == []
    many = pa.table({"g": np.arange(1000.0), "y": ["a", "b"] * 500})
    assert len(rule.warnings([500, 500, 0], [0], many)) == 3


# Earlier versions


def test_data_of_the_rules_before_is_not_continued(prepared: Prepare) -> None:
    data = prepared(pa.table(table(0.1)), group="customer")
    schema = {**data.artifact.read_json("schema.json"), "row_hash": 2}
    vouch_for(data.artifact.directory, "schema.json", json.dumps(schema).encode())
    with refuses(UserError, match=r"data\.earlier:"):
        prepared(pa.table(table(0.2)), group="customer", earlier=str(data.artifact.directory))


def test_rules_that_differ_for_groups_only_are_the_same_without_one(prepared: Prepare) -> None:
    columns = table(0.1)
    data = prepared(pa.table(columns))
    schema = {**data.artifact.read_json("schema.json"), "row_hash": 2}
    vouch_for(data.artifact.directory, "schema.json", json.dumps(schema).encode())
    before, now = (holdout_rule(PreparedData.open(data.artifact.directory)), holdout_rule(prepared(pa.table(columns))))
    assert before and now and before.settings["row_hash"] == 2 and now.settings["row_hash"] == 3
    check_unseen(now, before)
    more = prepared(pa.table(table(0.2)), name="more", earlier=str(data.artifact.directory))
    assert all(len(more.split(split)) > len(data.split(split)) for split in SPLITS)


def test_a_promotion_knows_what_decided(prepared: Prepare) -> None:
    columns: dict[str, Any] = table(0.1)
    full = holdout_rule(prepared(pa.table({**columns, "customer": columns["order"]}), group="customer", id="order"))
    some = holdout_rule(prepared(pa.table(columns), group="customer", id="order"))
    none = holdout_rule(prepared(pa.table(columns), group="customer"))
    assert full and some and none
    assert [each.settings["columns"] for each in (full, some)] == [["customer"], ["customer", "order"]]
    assert none.settings["columns"] == ["customer", "order", "x", "y"]
    with refuses(Incomparable):
        check_unseen(some, type(some)(some.by, {**some.settings, "row_hash": 2}, None))
