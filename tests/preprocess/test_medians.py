"""The card's medians are those of all training rows, whatever the sample says and whoever does the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.artifact import Artifact
from tasks.preprocess import budget, engine, medians
from tasks.preprocess.config import DataConfig
from tests.preprocess.test_spread import MADE_BY, on_several

ROWS, GROUP = 40_000, 3000
#: The first rows train, the last are held out: the test knows which without asking the code under test.
TRAINING = 30_000
CONFIG = DataConfig.from_dict(
    {
        "time": "when",
        "quarantine_limit": 0.01,
        "split": {"validation_from": "2020-01-21T20:00:00", "test_from": "2020-01-25"},
    }
)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    gaps = draw.random(ROWS) < 0.3
    frame = pd.DataFrame(
        {
            "when": pd.Timestamp("2020-01-01", tz="UTC") + pd.to_timedelta(np.arange(ROWS), "min"),
            "normal": draw.normal(size=ROWS),
            "gaps": np.where(gaps, np.nan, draw.normal(5, 1, ROWS)),
            "tail": draw.lognormal(0, 4, ROWS),
            "narrow": draw.normal(size=ROWS).astype(np.float32),
            "whole": draw.integers(0, 10**9, ROWS),
            "digits": draw.integers(0, 10, ROWS),
            "flag": draw.random(ROWS) < 0.6,
            # The median lies just above a heavy value, just below one, and between two.
            "above": np.where(draw.random(ROWS) < 0.495, 0.0, draw.random(ROWS)),
            "below": np.where(draw.random(ROWS) < 0.495, 1.0, draw.random(ROWS)),
            "halves": (np.arange(ROWS) % 2) * 7.0,
            "one": np.where(np.arange(ROWS) % 10_000 == 0, np.nan, 3.0),
            "seldom": np.where(np.arange(ROWS) % 7001 == 1, draw.normal(size=ROWS), np.nan),
            "y": draw.integers(0, 2, ROWS),
        }
    )
    frame.loc[100:120, "normal"] = np.inf
    return frame


@pytest.fixture(scope="module")
def data(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "t.parquet"
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path, row_group_size=GROUP)
    return path


@pytest.fixture(scope="module")
def expected(frame: pd.DataFrame) -> dict[str, float]:
    train = frame[:TRAINING][np.isfinite(frame["normal"][:TRAINING])]
    seconds = train.assign(when=train["when"].astype("int64") / 10 ** {"ns": 9, "us": 6}[train["when"].dt.unit])
    return {name: float(np.median(column.dropna().astype(float))) for name, column in seconds.items()}


def prepare(directory: Path, data: Path, workers: int = 1, config: DataConfig = CONFIG) -> Artifact:
    return engine.prepare(directory, str(data), "y", config, MADE_BY, workers)


def said(made: Artifact) -> dict[str, float]:
    return {column["name"]: column["median"] for column in made.read_json("card.json")["columns"]}


def counting(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The columns that are passed over again, unit by unit."""
    asked: list[list[str]] = []
    original = engine.keep_unit

    def keep_unit(job: medians.Keeping) -> medians.Kept:
        asked.append(list(job.brackets))
        return original(job)

    monkeypatch.setattr(engine, "keep_unit", keep_unit)
    return asked


def test_medians_are_exact_on_any_number_of_processes_and_pods(
    data: Path, expected: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counting(monkeypatch)
    alone = prepare(tmp_path / "alone", data)
    card = alone.read_json("card.json")
    assert card["rows"]["quarantined"] == 21 and card["sampled_rows"] < 0.9 * ROWS, "the sample must not be the table"
    assert said(alone) == expected
    assert "median" not in card["of_sample"] and "p25" in card["of_sample"]
    assert asked == [], "one pass must do"
    assert prepare(tmp_path / "two", data, workers=2).fingerprint == alone.fingerprint
    shared = on_several(tmp_path / "pods", str(data), 3, CONFIG)
    assert shared.fingerprint == alone.fingerprint


def test_medians_beside_an_earlier_set_are_of_the_new_files(data: Path, frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    early = pa.Table.from_pandas(frame[1::8].assign(normal=0.5, tail=1e6), preserve_index=False)
    pq.write_table(early, tmp_path / "data/0.parquet")
    prepare(tmp_path / "earlier", tmp_path / "data")
    (tmp_path / "data/1.parquet").hardlink_to(data)
    made = prepare(tmp_path / "made", tmp_path / "data", config=replace(CONFIG, earlier=str(tmp_path / "earlier")))
    train = frame[:TRAINING][np.isfinite(frame["normal"][:TRAINING])]
    assert said(made)["tail"] == np.median(train["tail"]) and said(made)["digits"] == np.median(train["digits"])


@pytest.mark.parametrize("how", ["too narrow", "elsewhere"])
def test_a_bracket_that_misses_is_widened(
    data: Path, expected: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    whole = prepare(tmp_path / "whole", data)
    original = medians.bracket
    if how == "too narrow":
        monkeypatch.setattr(medians, "FAR", 1e-4)
    else:
        first = medians.FAR
        monkeypatch.setattr(medians, "bracket", lambda sample, far: original(sample + (far == first) * 1e12, far))
    asked = counting(monkeypatch)
    made = prepare(tmp_path / "made", data)
    assert said(made) == expected and made.fingerprint == whole.fingerprint
    units = -(-ROWS // GROUP)
    # Columns whose median was found are not asked for again.
    assert len(asked) >= units and len(asked) % units == 0
    assert [len(asked[turn]) for turn in range(0, len(asked), units)] == sorted(map(len, asked[::units]), reverse=True)
    assert ("one" in asked[0]) == (how == "elsewhere")


def test_pods_widen_a_bracket_too(
    data: Path, expected: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medians, "FAR", 1e-3)
    asked = counting(monkeypatch)
    assert said(on_several(tmp_path / "pods", str(data), 3, CONFIG)) == expected
    assert asked


def test_text_that_pods_share_is_passed_over_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(budget, "FEWEST_SAMPLED", 500)
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(3)
    for file in range(3):
        lines = [f"{file}-{place},{x},{'ab'[place % 2]}\n" for place, x in enumerate(draw.normal(size=800))]
        (tmp_path / f"data/{file}.csv").write_text("id,x,y\n" + "".join(lines))
    config = DataConfig(id="id")
    alone = engine.prepare(tmp_path / "alone", str(tmp_path / "data"), "y", config, MADE_BY)
    monkeypatch.setattr(medians, "FAR", 1e-3)
    asked = counting(monkeypatch)
    assert on_several(tmp_path / "pods", str(tmp_path / "data"), 2, config).fingerprint == alone.fingerprint
    assert asked


def test_little_room_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, float]
) -> None:
    """Values are written in many small blocks, and the median is picked on disk."""
    monkeypatch.setattr(budget.Budget, "held_values", 40)
    assert said(prepare(tmp_path / "made", data)) == expected


def test_few_values_keep_nothing_and_others_a_few_in_a_hundred(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[medians.Kept] = []
    original = engine.medians_of

    def medians_of(*arguments):  # type: ignore[no-untyped-def]
        found[:] = arguments[3]
        assert list(arguments[2])[1:4] == ["normal", "gaps", "tail"]
        return original(*arguments)

    monkeypatch.setattr(engine, "medians_of", medians_of)
    made = prepare(tmp_path / "made", data)
    names = [column["name"] for column in made.read_json("card.json")["columns"]]
    inside = dict(zip(names, sum(part.lengths.sum(axis=0) for part in found), strict=True))
    assert all(inside[name] == 0 for name in ("digits", "flag", "halves", "one"))
    assert all(0 < inside[name] < 0.04 * TRAINING for name in ("normal", "tail", "whole", "above", "below"))


def test_the_bracket_is_where_the_median_of_all_must_lie() -> None:
    draw = np.random.default_rng(5)
    for _ in range(200):
        table = draw.normal(size=9000)
        ends = medians.bracket(table[:2000], medians.FAR)
        assert ends.low < np.median(table) < ends.high
        assert np.mean((table > ends.low) & (table < ends.high)) < 0.13
    assert medians.bracket(np.array([1.0, 2.0]), 4.0) == medians.Bracket(-np.inf, np.inf, at_low=False, at_high=False)
    assert medians.bracket(np.full(500, 3.0), 4.0) == medians.Bracket(3.0, 3.0, at_low=True, at_high=False)
