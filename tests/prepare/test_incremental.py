"""New files after an earlier preparation: statistics and rows stay, and only new files are processed."""

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare import engine, shuffle
from slipstream.pipeline.prepare.base_set import setting_value
from slipstream.pipeline.prepare.fit.scan import scan_unit
from slipstream.pipeline.prepare.resolve import resolve_source
from slipstream.pipeline.prepare.sharded import shares
from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import SPLITS, TARGET, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, SplitConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.groups import ALONE
from tests.support.proving import diagonal, first_few
from tests.support.shares import on_several
from tests.support.wording import refuses, same_wording

ROWS = 1200


def month(seed: int, cities: str = "abc", shift: float = 0.0, gaps: bool = False) -> pa.Table:
    """A month of sales. Ids go on from month to month."""
    draw = np.random.default_rng(seed)
    number = draw.normal(shift, 1, ROWS)
    if gaps:
        number[::10] = np.nan
    return pa.table(
        {
            "id": np.arange(ROWS) + seed * ROWS,
            "number": number,
            "city": draw.choice(list(cities), ROWS),
            "y": draw.integers(0, 2, ROWS),
        }
    )


def prepare(directory: Path, data: Path, earlier: Path | str = "", **settings: Any) -> PreparedData:
    config = DataConfig.from_dict({"id": "id", "earlier": str(earlier), **settings})
    made_by = {"source": fingerprint_source(list_source(str(data)), "y")}
    engine.prepare(directory, str(data), "y", config, made_by)
    return PreparedData.open(directory)


@pytest.fixture
def sales(tmp_path: Path) -> Path:
    (tmp_path / "sales").mkdir()
    pq.write_table(month(0), tmp_path / "sales/january.parquet", row_group_size=300)
    return tmp_path / "sales"


@pytest.fixture
def january(sales: Path, tmp_path: Path) -> PreparedData:
    return prepare(tmp_path / "january", sales)


def add(sales: Path, name: str, table: pa.Table) -> None:
    pq.write_table(table, sales / f"{name}.parquet", row_group_size=600)


def test_rows_that_are_there_stay_and_new_ones_become_segments(
    sales: Path, january: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(sales, "february", month(1, cities="abz", gaps=True))
    scanned = []

    @functools.wraps(scan_unit)  # a record of its results needs the type that it returns
    def noted(job: Any) -> Any:
        scanned.append(job.unit.file)
        return scan_unit(job)

    monkeypatch.setattr("slipstream.pipeline.prepare.table.scan_unit", noted)
    both = prepare(tmp_path / "both", sales, january.artifact.directory)
    # What was there was neither read again as data nor written again as bytes.
    assert scanned == [str(sales / "february.parquet")] * 2
    for split in SPLITS:
        assert both.segments(split) == [f"{split}-00000.rows", f"{split}-00001.rows"]
        first, again = (data.artifact.path(f"{split}-00000.rows") for data in (january, both))
        assert first.stat().st_ino == again.stat().st_ino
    both.artifact.check_sha256()
    assert both.signature == january.signature
    assert both.artifact.read_json("statistics.json") == january.artifact.read_json("statistics.json")
    rows, before = both.card["rows"], january.card["rows"]
    assert rows["kept"] == 2 * ROWS and all(sum(both.segment_rows(split)) == rows[split] for split in SPLITS)
    assert all(rows[split] > before[split] for split in SPLITS)

    new = np.concatenate([records(both, f"{split}-00001.rows") for split in SPLITS])
    codes = np.bincount(new["categorical"][:, 0])
    table = pq.read_table(sales / "february.parquet").to_pandas()
    # A city that January had not is unseen, a missing number is January's mean.
    assert codes[1] == (table["city"] == "z").sum() and codes.sum() == ROWS
    assert (new["numeric"][:, 0] == 0).sum() == table["number"].isna().sum() == 120


def records(data: PreparedData, segment: str) -> np.ndarray:
    return data.mapped(segment).reshape(-1).view(data.signature.record)


def test_a_row_has_the_split_that_it_would_have_had(sales: Path, january: PreparedData, tmp_path: Path) -> None:
    add(sales, "february", month(1))
    beside = prepare(tmp_path / "extended", sales, january.artifact.directory)
    anew = prepare(tmp_path / "fresh", sales)
    assert {split: beside.card["rows"][split] for split in SPLITS} == {s: anew.card["rows"][s] for s in SPLITS}
    # The same without January's file: what the base set has seen need not be there any more.
    (sales / "january.parquet").unlink()
    alone = prepare(tmp_path / "alone", sales, january.artifact.directory)
    for split in SPLITS:
        assert [alone.artifact.files[n].sha256 for n in alone.segments(split)] == [
            beside.artifact.files[n].sha256 for n in beside.segments(split)
        ]


def test_sets_can_be_continued_again_and_an_epoch_mixes_their_segments(
    sales: Path, january: PreparedData, tmp_path: Path
) -> None:
    add(sales, "february", month(1))
    two = prepare(tmp_path / "two", sales, january.artifact.directory)
    add(sales, "march", month(2, shift=5.0))
    three = prepare(tmp_path / "three", sales, two.artifact.directory)
    assert len(three.segments("train")) == 3 and three.card["rows"]["kept"] == 3 * ROWS
    # Drift is against the data of the statistics, not against the last month.
    drift = {column["name"]: column.get("drift", {}).get("earlier") for column in three.card["columns"]}
    assert drift["number"] > 1 and drift["city"] < 0.1
    assert [w for w in three.card["warnings"] if "'number' is distributed differently than in the earlier data" in w]
    assert not [w for w in two.card["warnings"] if "earlier data" in w]

    order = GlobalOrder(stored_blocks(three, "train"), 90, seed=0)
    edges = np.cumsum(three.segment_rows("train"))
    seen = []
    for step, batch in enumerate(training_batches(three, order, ALONE, stop=int(edges[-1]))):
        rows = order.batch(step)
        seen += rows.tolist()
        if batch.size == 90:
            assert np.bincount(np.searchsorted(edges, rows, side="right"), minlength=3).min() >= 20
    assert sorted(seen) == list(range(edges[-1]))


def test_segments_in_parts_can_be_continued(sales: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "PART_BYTES", 4000)
    first = prepare(tmp_path / "first", sales)
    add(sales, "february", month(1))
    both = prepare(tmp_path / "both", sales, first.artifact.directory)
    names, rows = both.segments("train"), both.segment_rows("train")
    assert names[:2] == ["train-00000.rows", "train-00000_00001.rows"] and "train-00001_00001.rows" in names
    assert names[: len(first.segments("train"))] == first.segments("train")
    assert both.shuffled_rows("train") == (
        sum(first.segment_rows("train")),
        sum(rows) - sum(first.segment_rows("train")),
    )
    whole = both.split("train")
    assert isinstance(whole, np.memmap) and whole.tobytes() == b"".join(
        both.artifact.path(name).read_bytes() for name in names
    )
    order = GlobalOrder(stored_blocks(both, "train"), 90, seed=0)
    batches = list(training_batches(both, order, ALONE, stop=sum(rows)))
    assert sum(batch.size for batch in batches) == sum(rows) == both.card["rows"]["train"]


def test_when_nothing_is_new_the_earlier_set_is_given_again(
    sales: Path, january: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sales / "empty.parquet").touch()
    again = prepare(tmp_path / "again", sales, january.artifact.directory)
    output = capsys.readouterr().err
    same_wording(output)
    # The same fingerprint: what was trained on it needs no training again.
    assert again.artifact.check_sha256().fingerprint == january.artifact.fingerprint
    for name in again.artifact.files:
        assert again.artifact.path(name).stat().st_ino == january.artifact.path(name).stat().st_ino, name
    # And it can be continued like any other.
    add(sales, "february", month(1))
    assert len(prepare(tmp_path / "two", sales, again.artifact.directory).segments("train")) == 2
    # Settings with which it would be another set are refused all the same.
    (sales / "february.parquet").unlink()
    with pytest.raises(UserError, match=r"data\.split"):
        prepare(tmp_path / "other", sales, january.artifact.directory, split={"seed": 9})


def test_text_is_read_as_the_types_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    lines = "".join(f"{i},{i % 40},{'ab'[i % 2]}\n" for i in range(400))
    (tmp_path / "texts/1.csv").write_text("id,x,y\n" + lines)
    first = prepare(tmp_path / "first", tmp_path / "texts")
    # By itself this file would have a column x of texts.
    (tmp_path / "texts/2.csv").write_text("id,x,y\n" + "".join(f"{i},?,a\n{i + 50},7,b\n" for i in range(400, 450)))
    second = prepare(tmp_path / "second", tmp_path / "texts", first.artifact.directory)
    new = np.concatenate([records(second, f"{split}-00001.rows") for split in SPLITS])
    assert (new["numeric"][:, 0] == 0).sum() == 50 and sorted(np.bincount(new[TARGET])) == [50, 50]


def test_other_bytes_are_found_though_nobody_named_a_fingerprint(sales: Path, tmp_path: Path) -> None:
    path = sales / "january.parquet"
    engine.prepare(tmp_path / "first", str(sales), "y", DataConfig(), {})
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with refuses(UserError):
        engine.prepare(tmp_path / "second", str(sales), "y", DataConfig(earlier=str(tmp_path / "first")), {})


@pytest.mark.parametrize(
    "what",
    first_few(
        [
            "changed",
            "grown",
            "another seed",
            "another target",
            "a class more",
            "a column more",
            "damaged",
            "no such set",
        ],
        3,
    ),
)
def test_what_does_not_fit_is_said(what: str, sales: Path, january: PreparedData, tmp_path: Path) -> None:
    earlier, settings = january.artifact.directory, {}
    february = month(1)
    if what == "a class more":
        february = february.set_column(3, "y", pa.array([7] * 50 + [1] * (ROWS - 50)))
    if what == "a column more":
        february = february.append_column("more", pa.array([1] * ROWS))
    add(sales, "february", february)
    if what == "changed":
        raw = bytearray((sales / "january.parquet").read_bytes())
        raw[100] ^= 1
        (sales / "january.parquet").write_bytes(raw)
    if what == "grown":
        add(sales, "january", pa.concat_tables([month(0), month(5)]))
    if what == "another seed":
        settings = {"split": {"seed": 9}}
    if what == "another target":
        (tmp_path / "only").mkdir()
        shutil.copy(sales / "january.parquet", tmp_path / "only")
        other = Artifact.open(tmp_path / "january", "prepare")
        engine.prepare(tmp_path / "other", str(tmp_path / "only"), "city", DataConfig(id="id"), other.made_by)
        earlier = tmp_path / "other"
    if what == "damaged":
        path = earlier / "train-00000.rows"
        raw = bytearray(path.read_bytes())
        raw[50] ^= 1
        path.write_bytes(raw)
    if what == "no such set":
        earlier = tmp_path / "nowhere"
    with refuses(UserError):
        prepare(tmp_path / "both", sales, earlier, **settings)


@pytest.mark.parametrize(("new", "damage"), diagonal([False, True], ["flipped", "cut", "removed", "remade"]))
def test_a_base_set_is_verified_where_its_rows_are_taken(
    damage: str, new: bool, sales: Path, january: PreparedData, tmp_path: Path
) -> None:
    """Between the listing and the work, which may be in another pod and days later."""
    base = january.artifact.directory
    if new:
        add(sales, "february", month(1))
    source = resolve_source(list_source(str(sales)), "y", DataConfig(id="id", earlier=str(base)))
    rows = base / "train-00000.rows"
    if damage == "flipped":
        raw = bytearray(rows.read_bytes())
        raw[50] ^= 1
        rows.write_bytes(raw)
    if damage == "cut":
        rows.write_bytes(rows.read_bytes()[:100])
    if damage == "removed":
        shutil.rmtree(base)
    if damage == "remade":
        shutil.rmtree(base)
        other = DataConfig(id="id", split=SplitConfig(seed=9))
        engine.prepare(base, str(sales), "y", other, {})
    with pytest.raises(UserError, match=r"^data\.earlier: .*january"):
        engine.prepare_source(tmp_path / "both", source, {}, workers=1)
    assert not (tmp_path / "both/manifest.json").exists()


def test_several_pods_verify_a_base_set_where_they_put_the_data_together(
    sales: Path, january: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = january.artifact.directory / "train-00000.rows"
    add(sales, "february", month(1))
    config = DataConfig(id="id", earlier=str(january.artifact.directory))
    whole, fit = rows.read_bytes(), shares.fit_shares
    monkeypatch.setattr(shares, "fit_shares", lambda *given: rows.write_bytes(whole[:-1] + b"?") and fit(*given))
    with pytest.raises(UserError, match=r"^data\.earlier: .*train-00000\.rows"):
        on_several(tmp_path / "pods", str(sales), 2, config)
    monkeypatch.undo()
    rows.write_bytes(whole)
    assert on_several(tmp_path / "again", str(sales), 2, config).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"types": {"number": "text"}}, r"data\.types\.number:"),
        ({"types": {"number": "category"}}, r"data\.types\.number:"),
        ({"types": {"city": "number"}}, r"data\.types\.city:"),
        ({"types": {"city": "document"}}, r"data\.types\.city:"),
        ({"types": {"cty": "text"}}, r"data\.types:"),
        ({"task": "regression"}, r"data\.task:"),
    ],
)
@pytest.mark.parametrize("new", [True, False])
def test_another_type_or_task_than_the_base_set_has_is_refused(
    settings: dict[str, Any], message: str, new: bool, sales: Path, january: PreparedData, tmp_path: Path
) -> None:
    if new:
        add(sales, "february", month(1))
    with refuses(UserError, match=message):
        prepare(tmp_path / "both", sales, january.artifact.directory, **settings)


def test_what_the_base_set_was_made_with_may_be_said_again(sales: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "types": {"number": "number", "city": "document", "id": "text"},
        "task": "classification",
        "text_length": 8,
    }
    first = prepare(tmp_path / "first", sales, **settings)
    add(sales, "february", month(1))
    again = prepare(tmp_path / "again", sales, first.artifact.directory, **settings)
    assert again.card["rows"]["kept"] == 2 * ROWS
    with refuses(UserError, match=r"data\.text_length:"):
        prepare(tmp_path / "longer", sales, first.artifact.directory, **{**settings, "text_length": 256})
    with refuses(UserError, match=r"data\.types\.city:"):
        prepare(tmp_path / "other", sales, first.artifact.directory, **{**settings, "types": {"city": "category"}})


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("text", pa.array(["lots", "few"] * (ROWS // 2))),
        ("time", pa.array([0, 86_400] * (ROWS // 2)).cast(pa.timestamp("s"))),
        ("other", pa.array([[1]] * ROWS)),
        ("", pa.array([0.5, 1.5] * (ROWS // 2))),
        ("", pa.array(["1", "2"] * (ROWS // 2))),
        ("", pa.nulls(ROWS)),
    ],
)
def test_a_column_of_whole_numbers_stays_one(kind: str, column: pa.Array, sales: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    add(sales, "january", month(0).append_column("count", pa.array(draw.integers(0, 9, ROWS))))
    first = prepare(tmp_path / "first", sales)
    add(sales, "february", month(1).append_column("count", column))
    if kind:
        with refuses(UserError):
            prepare(tmp_path / "both", sales, first.artifact.directory)
    else:
        assert prepare(tmp_path / "both", sales, first.artifact.directory).card["rows"]["kept"] == 2 * ROWS


def test_settings_that_came_from_json_are_kept_like_those_made_in_python() -> None:
    constructed = DataConfig(split=SplitConfig(seed=3))
    read = DataConfig.from_dict({"split": {"seed": 3}})
    assert (
        setting_value(constructed, "split")
        == setting_value(read, "split")
        == {"validation": 0.15, "test": 0.15, "seed": 3, "validation_from": "", "test_from": ""}
    )
