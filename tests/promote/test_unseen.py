"""Every test row that the promoted model was trained on is found, whatever changed between two preparations."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.assemble import holdout_rule
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.comparison import Incomparable, check_unseen
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import Holdout
from slipstream.shared.source.config import DataConfig
from tests.support.formats import FORMATS, places, prepare_as, rows_of_all_kinds
from tests.support.proving import first_few
from tests.support.wording import refuses, same_wording

#: What changes, and what the refusal says of it; with an empty one the rows have to be told apart as before.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"missing": ["", "-999"]}, r"data\.missing \['', '\?'.*\], this one with \['', '-999'\]"),
    "the order of the marks": ({"missing": ["", "NA", "?", "N/A", "NaN", "nan", "null", "NULL", "None"]}, ""),
    "categories": ({"types": {"level": "category", "flag": "category"}}, ""),
    "texts": ({"types": {"share": "text", "flag": "text"}}, ""),
    "numbers": ({"types": {"level": "number", "flag": "boolean"}}, ""),
    "decimal": ({"decimal": ","}, r"data\.decimal \., this one with ,"),
    "seed": ({"split": {"seed": 1}}, r"data\.split\.seed 0, this one with 1"),
    "columns": ({"drop": ["city"]}, "rows known by"),
}


@pytest.mark.parametrize("change", first_few(CHANGES, 3))
def test_other_settings(change: str, tmp_path: Path) -> None:
    settings, refusal = CHANGES[change]
    columns = rows_of_all_kinds()
    before = prepare_as("csv", tmp_path / "before", columns)
    after = prepare_as("csv", tmp_path / "after", columns, **settings)
    if refusal:
        with pytest.raises(Incomparable, match=refusal):
            check_unseen(holdout_rule(after), holdout_rule(before))
    else:
        check_unseen(holdout_rule(after), holdout_rule(before))
        assert places(after) == places(before)


def test_what_is_refused_would_have_been_trained_on(tmp_path: Path) -> None:
    columns = rows_of_all_kinds()
    before = places(prepare_as("csv", tmp_path / "before", columns))
    after = places(prepare_as("csv", tmp_path / "after", columns, missing=["", "-999"]))
    assert [mark for mark, split in after.items() if split == "test" and before[mark] == "train"]


@pytest.mark.parametrize("by", first_few(["content", "id", "group"]))
def test_other_formats(by: str, tmp_path: Path) -> None:
    columns = rows_of_all_kinds()
    columns["who"] = pa.array([2**60 + n for n in range(len(columns["y"]))])
    settings = {} if by == "content" else {by: "who"}
    prepared = {format: prepare_as(format, tmp_path / format, columns, **settings) for format in FORMATS}
    before = prepared["parquet"]
    for format, after in prepared.items():
        check_unseen(holdout_rule(after), holdout_rule(before))
        assert places(after) == places(before), format


def test_a_package_of_earlier_rules_is_refused(tmp_path: Path) -> None:
    holdout = holdout_rule(prepare_as("csv", tmp_path / "now", rows_of_all_kinds()))
    assert holdout is not None
    told_then = ("validation", "test", "seed", "columns")
    earlier = Holdout(holdout.by, {name: holdout.settings[name] for name in told_then}, None)
    with refuses(Incomparable):
        check_unseen(holdout, earlier)


@pytest.mark.parametrize("split", ["column", "directories"])
def test_a_given_split_is_compared_only_on_equal_test_rows(
    split: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = rows_of_all_kinds()
    names = ["test" if n % 5 == 0 else "validation" if n % 5 == 1 else "train" for n in range(len(columns["y"]))]

    def prepared(name: str, names: list[str], earlier: str = "", chosen: slice = slice(None)) -> PreparedData:
        table = pa.table({**columns, "split": pa.array(names)}).to_pandas()[chosen]
        for number, (folder, rows) in enumerate(table.groupby("split") if split == "directories" else [("", table)]):
            (tmp_path / name / folder).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(tmp_path / name / folder / f"{name}-{number}.parquet")
        settings = {"split": {split: "split"}} if split == "column" else {"split": {split: True}, "drop": ["split"]}
        config = DataConfig.from_dict({"earlier": earlier, **settings})
        prepare(tmp_path / f"{name} prepared", str(tmp_path / name), "y", config, {}, workers=1)
        return PreparedData.open(tmp_path / f"{name} prepared")

    before = prepared("before", names)
    moved = prepared("moved", [*names[1:], names[0]])
    assert [mark for mark, place in places(moved).items() if place == "test" and places(before)[mark] == "train"]
    with refuses(Incomparable):
        check_unseen(holdout_rule(moved), holdout_rule(before))
    fewer = prepared("fewer", names, chosen=slice(100))
    with refuses(Incomparable):
        check_unseen(holdout_rule(before), holdout_rule(fewer))
    check_unseen(
        holdout_rule(prepared("same", ["dev" if name == "validation" else name for name in names])),
        holdout_rule(before),
    )
    if split == "column":
        kept = [name if n < 100 else "train" for n, name in enumerate(names)]
        added = prepared("added", kept, str(tmp_path / "fewer prepared"), slice(100, None))
        check_unseen(holdout_rule(added), holdout_rule(fewer))
        other = prepared("other", names, str(tmp_path / "fewer prepared"), slice(100, None))
        assert holdout_rule(other) == holdout_rule(before)
    assert not caplog.records
    untold = Holdout("the given split", {split: {"column": "split", "directories": True}[split]}, None)
    check_unseen(holdout_rule(moved), untold)
    same_wording(caplog.messages[-1])


def test_times_and_numbers_are_not_compared(tmp_path: Path) -> None:
    """20210101 is less than the seconds of any recent day."""
    columns = rows_of_all_kinds()
    days = [when.strftime("%Y%m%d") for when in columns["when"].to_pylist()]
    numbers = prepare_as("csv", tmp_path / "numbers", {**columns, "when": pa.array(days)}, time="when")
    dates = {"when": "date"}
    times = prepare_as("csv", tmp_path / "times", {**columns, "when": pa.array(days)}, time="when", types=dates)
    with refuses(Incomparable):
        check_unseen(holdout_rule(times), holdout_rule(numbers))
