"""A row's split depends on its id or its content and on nothing else."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.prepare.fit.splits import assign_splits
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.identity import hash_rows, hash_values, row_keys, splitmix64
from slipstream.shared.source.config import SplitConfig
from tests.support.tables import Prepare, table_text
from tests.support.wording import refuses


def rows_of(data: PreparedData, split: str, text: str) -> set[int]:
    """Which rows of the CSV ``text`` a split holds, found by the column "number"."""
    raw = np.array([float(line.split(",")[0]) for line in text.splitlines()[1:]])
    mean, std = next((c["mean"], c["std"]) for c in data.card["columns"] if c["name"] == "number")
    stored = data.split(split)["numeric"][:, 0].astype(float) * std + mean
    result = np.abs(stored[:, None] - raw).argmin(axis=1)
    assert np.abs(stored - raw[result]).max() < 1e-5
    return set(result.tolist())


def test_shares_are_kept_and_equal_hashes_stay_together() -> None:
    hashes = splitmix64(np.arange(100_000, dtype=np.uint64))
    splits = assign_splits(hashes, SplitConfig(validation=0.1, test=0.3))
    assert np.bincount(splits) / 1e5 == pytest.approx([0.6, 0.1, 0.3], abs=0.006)
    assert (assign_splits(np.repeat(hashes[:50], 3), SplitConfig()).reshape(50, 3).std(axis=1) == 0).all()
    assert (splits != assign_splits(hashes, SplitConfig(validation=0.1, test=0.3, seed=1))).mean() > 0.3


def test_adding_rows_moves_no_old_row(prepared: Prepare) -> None:
    text = table_text(400)
    before = prepared(text)
    longer = text + table_text(300, seed=9).split("\n", 1)[1]
    after = prepared(longer)
    for split in SPLITS:
        assert rows_of(before, split, text) <= rows_of(after, split, longer)
    assert after.card["rows"]["kept"] == 700


def test_duplicates_share_a_split(prepared: Prepare) -> None:
    header, rows = table_text(300).split("\n", 1)
    once, twice = prepared(header + "\n" + rows), prepared(header + "\n" + rows + rows)
    for split in SPLITS:
        assert twice.card["rows"][split] == 2 * once.card["rows"][split]


def test_an_id_alone_decides_when_it_is_given(prepared: Prepare) -> None:
    ids = np.repeat(np.arange(200), 3)
    x = np.random.default_rng(0).normal(size=600)
    data = prepared(pa.table({"who": ids, "x": x, "copy": ids % 97 * 1.0, "y": ids % 2}), id="who")
    expected = assign_splits(hash_rows([("who", pa.array(ids))], 600), SplitConfig())
    assert [data.card["rows"][split] for split in SPLITS] == np.bincount(expected).tolist()
    assert all(data.card["rows"][split] % 3 == 0 for split in SPLITS)


def test_a_group_stays_together_and_is_no_feature(prepared: Prepare) -> None:
    draw = np.random.default_rng(0)
    customers = np.repeat([f"c{n}" for n in range(150)], 4)
    mark = np.repeat(np.arange(150) / 7, 4)
    data = prepared(pa.table({"who": customers, "mark": mark, "y": draw.integers(0, 2, 600)}), group="who")
    held = [set(np.unique(data.split(split)["numeric"][:, 0]).tolist()) for split in SPLITS]
    assert sum(map(len, held)) == 150 == len(set.union(*held))
    assert data.signature.inputs[0].shape == (1,) and len(data.signature.inputs) == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_by_time_the_latest_rows_test(prepared: Prepare, pinned: bool) -> None:
    draw = np.random.default_rng(1)
    day = draw.permutation(np.repeat(np.arange(100), 10))
    times = pa.array(np.datetime64("2024-01-01") + day)
    cuts = {"validation_from": "2024-03-01", "test_from": "2024-03-21"} if pinned else {}
    table = pa.table({"when": times, "x": day * 1.0, "y": draw.integers(0, 2, 1000)})
    data = prepared(table, time="when", split=cuts)
    mean, std = next((c["mean"], c["std"]) for c in data.card["columns"] if c["name"] == "x")
    days = {split: data.split(split)["numeric"][:, 0].astype(float) * std + mean for split in SPLITS}
    first, second = (60, 80) if pinned else (70, 85)
    assert np.rint([days["train"].max(), days["validation"].min()]).tolist() == [first - 1, first]
    assert np.rint([days["validation"].max(), days["test"].min()]).tolist() == [second - 1, second]
    later = pa.table({"when": pa.array(np.datetime64("2025-01-01") + day), "x": day * 1.0, "y": day % 2})
    if pinned:
        longer = prepared(pa.concat_tables([table, later.cast(table.schema)]), time="when", split=cuts)
        assert longer.card["rows"] | {"test": 0, "read": 0, "kept": 0} == data.card["rows"] | {
            "test": 0,
            "read": 0,
            "kept": 0,
        }


@pytest.mark.parametrize(
    "settings",
    [
        {"time": "a", "group": "b"},
        {"time": "y"},
        {"time": "t"},
        {"group": "g"},
        {"time": "a", "split": {"test_from": "soon"}},
        {"time": "a", "split": {"test_from": "2024-01-01"}},
        {"split": {"test_from": "2024-01-02", "validation_from": "2024-01-01"}},
        {"drop": ["a"], "id": "a"},
    ],
)
def test_what_cannot_be_split_by_is_said(prepared: Prepare, settings: dict[str, object]) -> None:
    text = "a,b,t,y\n" + "".join(f"{i},{i % 7},k{i % 5},{i % 2}\n" for i in range(100))
    with refuses(UserError):
        prepared(text, **settings)


def test_hashes_go_by_value_not_by_type_or_order() -> None:
    whole, real = pa.array([1, 2, None, -5]), pa.array([1.0, 2.0, float("nan"), -5.0])
    texts = pa.array(["a", "b", None, "a"])
    mixed = hash_rows([("n", whole), ("t", texts)], 4)
    np.testing.assert_array_equal(mixed, hash_rows([("t", texts.dictionary_encode()), ("n", real)], 4))
    assert len(np.unique(mixed)) == 4
    large = pa.array([2**60, 2**60 + 1])
    assert len(np.unique(hash_values(large, exact=True))) == 2
    # Frozen: these values decide the splits of data that has been prepared already. Others need another ROW_HASH.
    assert hash_rows([("n", whole)], 4)[0] == FROZEN


FROZEN = 12465358823135454130


def test_without_shuffle_rows_stay_in_order(prepared: Prepare) -> None:
    data = prepared(pa.table({"x": np.arange(900) * 1.5, "y": np.arange(900) % 2}), shuffle=False)
    for split in SPLITS:
        assert (np.diff(data.split(split)["numeric"][:, 0]) > 0).all()


def test_the_stored_order_is_a_fair_shuffle() -> None:
    order = np.argsort(row_keys(0, 100_000, 2))
    blocks = order[: 24 * 4096].reshape(24, 4096).mean(axis=1)
    expected = 100_000**2 / 12 / 4096
    assert 0.4 < ((blocks - 50_000) ** 2).mean() / expected < 2
    np.testing.assert_array_equal(row_keys(500, 10, 2), row_keys(0, 510, 2)[500:])
