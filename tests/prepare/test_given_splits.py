"""Splits that come with the data, by directory and by column: rows as written, counts of what splits share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from slipstream.pipeline.export.package.assemble import holdout_rule
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.comparison import Incomparable, check_unseen
from slipstream.shared.artifacts.prepared.data import SPLITS, TARGET, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, SplitConfig
from tests.support.shares import MADE_BY, on_several

NAMES = {"train": "Training", "validation": "dev", "test": "TEST"}


def frame(rows: int = 300, seed: int = 0) -> pd.DataFrame:
    """A table whose column ``x`` tells rows apart; ``split`` holds the names of :data:`NAMES`."""
    generator = np.random.default_rng(seed)
    x = np.arange(rows) + 1000.0 * seed
    split = generator.choice([NAMES[name] for name in SPLITS], rows, p=[0.6, 0.2, 0.2])
    return pd.DataFrame(
        {"x": x, "z": generator.normal(size=rows), "y": generator.choice(["a", "b"], rows), "split": split}
    )


def write(table: pd.DataFrame, place: Path, suffix: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    path = place.with_suffix(f".{suffix}")
    if suffix == "csv":
        table.to_csv(path, index=False)
    elif suffix == "parquet":
        table.to_parquet(path, index=False)
    elif suffix == "jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.reset_index(drop=True).to_feather(path)
    return path


def prepared(place: Path, data: Any, target: str = "y", **split: Any) -> PreparedData:
    config = (
        DataConfig(split=SplitConfig(**split)) if not isinstance(split.get("config"), DataConfig) else split["config"]
    )
    prepare(place, str(data) if isinstance(data, Path) else data, target, config, {})
    return PreparedData.open(place)


def values(data: PreparedData, split: str) -> list[float]:
    """The values of ``x`` of a split, sorted."""
    statistics = data.artifact.read_json("statistics.json")
    ((place, column),) = [(i, each) for i, each in enumerate(statistics["numeric"]) if each["name"] == "x"]
    records = data.split(split)["numeric"][:, place].astype(float)
    return sorted(np.round(records * column["std"] + column["mean"]).tolist())


def expected(table: pd.DataFrame, split: str) -> list[float]:
    return sorted(table.loc[table["split"] == NAMES[split], "x"].tolist())


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl", "arrow"])
def test_rows_of_every_split_are_those_of_the_column_and_of_the_directories(suffix: str, tmp_path: Path) -> None:
    table = frame()
    by_column = prepared(tmp_path / "column", write(table, tmp_path / "one/table", suffix), column="split")
    for name, rows in table.groupby("split"):
        write(rows.drop(columns="split"), tmp_path / "raw" / str(name) / "part", suffix)
    by_folder = prepared(tmp_path / "folder", tmp_path / "raw", directories=True)
    for split in SPLITS:
        assert values(by_column, split) == values(by_folder, split) == expected(table, split)
    roles = {each["name"]: each["role"] for each in by_column.artifact.read_json("schema.json")["columns"]}
    assert roles["split"] == "split" and by_column.signature.inputs[0].shape == by_folder.signature.inputs[0].shape
    for data in (by_column, by_folder):
        columns = read_columns(data.artifact.read_json("statistics.json"))
        assert isinstance(columns, RawColumns) and list(columns.types) == ["x", "z"]
    mean = by_column.artifact.read_json("statistics.json")["numeric"][0]["mean"]
    assert mean == pytest.approx(np.mean(expected(table, "train")))


def test_a_dataframe_and_shuffled_files_give_the_same_rows(tmp_path: Path) -> None:
    table = frame()
    found = prepared(tmp_path / "frame", table, column="split")
    parts = table.sample(frac=1, random_state=1)
    for number in range(3):
        write(parts.iloc[number::3], tmp_path / f"raw/{2 - number}", "parquet")
    shuffled = prepared(tmp_path / "shuffled", tmp_path / "raw", column="split")
    assert all(values(found, split) == values(shuffled, split) == expected(table, split) for split in SPLITS)


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    raw = write(frame(2000), tmp_path / "table", "csv")
    config = DataConfig(split=SplitConfig(column="split"))
    digests = {prepare(tmp_path / str(n), str(raw), "y", config, {}, workers=n).content for n in (1, 2)}
    assert len(digests) == 1


@pytest.mark.parametrize("missing", ["validation", "test"])
def test_a_missing_split_is_drawn_from_training_rows_and_given_rows_stay(
    missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = frame(2000)
    table = table[table["split"] != NAMES[missing]].reset_index(drop=True)
    data = prepared(tmp_path / "prepared", table, column="split", validation=0.2, test=0.2)
    kept = "test" if missing == "validation" else "validation"
    assert values(data, kept) == expected(table, kept)
    given = expected(table, "train")
    assert sorted([*values(data, "train"), *values(data, missing)]) == given
    assert len(values(data, missing)) == pytest.approx(0.2 * len(given), abs=4 * np.sqrt(0.16 * len(given)))
    sentence = f"no {missing} split is given; 0.2 of the training rows are drawn for it"
    assert sentence in caplog.text and any(sentence in each for each in data.card["warnings"])


def test_planted_leaks_are_counted_exactly_in_the_card(tmp_path: Path) -> None:
    table = frame(400)
    table["customer"] = [f"c{number}" for number in range(400)]
    table["session"] = [f"s{number}" for number in range(400)]
    train, test = (table.index[table["split"] == NAMES[name]] for name in ("train", "test"))
    columns = ["x", "z", "y"]
    table.loc[test[:17], columns] = table.loc[train[:17], columns].to_numpy()
    config = DataConfig(split=SplitConfig(column="split"))
    data = prepared(tmp_path / "rows", table[[*columns, "split"]], config=config)
    assert "data.split: 17 held-out rows equal a row of another given split" in data.card["warnings"]
    table.loc[test[:5], "customer"] = table.loc[train[:5], "customer"].to_numpy()
    table.loc[test[:9], "session"] = table.loc[train[20], "session"]
    named = replace(config, id="customer", group="session")
    data = prepared(tmp_path / "ids", table, config=named)
    assert "data.split: 5 ids occur in more than one given split" in data.card["warnings"]
    assert "data.split: 1 groups occur in more than one given split" in data.card["warnings"]


def test_times_of_training_rows_after_those_of_test_rows_are_counted(tmp_path: Path) -> None:
    table = frame(300)
    start = pd.Timestamp("2024-01-01")
    table["when"] = start + pd.to_timedelta(
        np.where(table["split"] == NAMES["test"], 1000, 0) + np.arange(300) % 7, "h"
    )
    train = table.index[table["split"] == NAMES["train"]]
    table.loc[train[:23], "when"] = start + pd.Timedelta(5000, "h")
    data = prepared(tmp_path / "prepared", table, column="split")
    assert "data.split: column 'when': 23 training rows are later than the first test row" in data.card["warnings"]


def test_images_in_split_folders_stay_there(tmp_path: Path) -> None:
    digits = load_digits()
    chosen = np.flatnonzero(digits.target < 3)[:240]
    folders = {"train": 160, "val": 40, "test": 40}
    start = 0
    for folder, rows in folders.items():
        for row in chosen[start : start + rows]:
            place = tmp_path / "raw" / folder / f"d{digits.target[row]}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(place / f"{row}.png")
        start += rows
    data = prepared(tmp_path / "prepared", tmp_path / "raw", "", directories=True)
    assert [len(data.split(split)) for split in SPLITS] == list(folders.values())
    start = 0
    for split, rows in zip(SPLITS, folders.values(), strict=True):
        records, of_split = data.split(split), chosen[start : start + rows]
        found = sorted(
            (int(label), image.tobytes()) for label, image in zip(records[TARGET], records["image"], strict=True)
        )
        pixels = (digits.images[of_split] * 15).astype(np.uint8)
        assert found == sorted((int(digits.target[r]), p.tobytes()) for r, p in zip(of_split, pixels, strict=True))
        start += rows
    assert not any("are ignored" in each for each in data.card["warnings"])


def test_arrays_and_texts_and_documents_are_split_by_folder(tmp_path: Path) -> None:
    digits = load_digits()
    for folder, rows in (("train", slice(0, 100)), ("val", slice(100, 140)), ("test", slice(140, 200))):
        (tmp_path / "arrays" / folder).mkdir(parents=True)
        pixels = (digits.images[rows] * 15).astype(np.uint8)
        np.savez(tmp_path / "arrays" / folder / "part.npz", images=pixels, labels=digits.target[rows])
        for number in range(12):
            words = tmp_path / "texts" / folder / ("good", "bad")[number % 2] / f"{number}.txt"
            words.parent.mkdir(parents=True, exist_ok=True)
            words.write_text(f"{folder} {number} word word {'fine' if number % 2 else 'poor'}")
            text = tmp_path / "documents" / folder / f"{number}.txt"
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text(f"{folder} says {number} many words. " * 20)
    arrays = prepared(tmp_path / "a", tmp_path / "arrays", "", directories=True)
    assert [len(arrays.split(split)) for split in SPLITS] == [100, 40, 60]
    texts = prepared(
        tmp_path / "t", tmp_path / "texts", "", config=DataConfig(format="text", split=SplitConfig(directories=True))
    )
    assert [len(texts.split(split)) for split in SPLITS] == [12, 12, 12]
    language = DataConfig(task="language", tokenizer="bytes", length=16, split=SplitConfig(directories=True))
    documents = prepared(tmp_path / "d", tmp_path / "documents", "", config=language)
    assert [documents.card["rows"][split] for split in SPLITS] == [12, 12, 12]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_and_conversations_of_a_table_are_split_by_a_column(suffix: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    split = generator.choice(["train", "valid", "test"], 90)
    texts = pd.DataFrame({"text": [f"document {n} has words" * 5 for n in range(90)], "split": split})
    talks = pd.DataFrame(
        {
            "prompt": [f"what is {n}?" for n in range(90)],
            "completion": [f"it is {n}" for n in range(90)],
            "split": split,
        }
    )
    for name, table in (("texts", texts), ("talks", talks)):
        config = DataConfig(task="language", tokenizer="bytes", length=64, split=SplitConfig(column="split"))
        data = prepared(tmp_path / name, write(table, tmp_path / f"raw/{name}", suffix), "", config=config)
        assert [data.card["rows"][of] for of in SPLITS] == [int((split == n).sum()) for n in ("train", "valid", "test")]


def test_several_pods_give_the_bytes_of_one_machine(tmp_path: Path) -> None:
    for number in range(3):
        for folder in ("train", "test"):
            write(frame(200, number), tmp_path / f"raw/{folder}/{number}", "csv")
    config = DataConfig(split=SplitConfig(directories=True), drop=["split"])
    alone = prepare(tmp_path / "alone", str(tmp_path / "raw"), "y", config, MADE_BY)
    assert on_several(tmp_path / "pods", str(tmp_path / "raw"), 3, config).fingerprint == alone.fingerprint


def test_the_holdout_of_a_given_split_is_another_than_that_of_the_hash(tmp_path: Path) -> None:
    table = frame()
    given = holdout_rule(prepared(tmp_path / "given", table, column="split"))
    drawn = holdout_rule(prepared(tmp_path / "drawn", table[table["split"] != "TEST"], column="split"))
    hashed = holdout_rule(prepared(tmp_path / "hashed", table))
    assert given and drawn and hashed
    assert given.by == "the given split" and given.settings.keys() == {"column", "held_out"}
    assert drawn.by == hashed.by == "content" and drawn.settings != hashed.settings
    check_unseen(given, given)
    for promoted in (hashed, drawn):
        with pytest.raises(Incomparable, match=r"content, .*given split"):
            check_unseen(given, promoted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "holdout"}, r"data\.split\.column: the column 'split' holds 'holdout'; expected only train, "),
        ({"split": None}, r"data\.split\.column: .* holds ''; expected only train, "),
        ({"split": "test"}, r"data\.split\.column: there is no training split, only 'test'"),
    ],
)
def test_other_names_and_a_missing_training_split_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "prepared", frame(50).assign(**change), column="split")


def test_other_folders_are_refused_by_their_names(tmp_path: Path) -> None:
    for folder in ("train", "holdout"):
        write(frame(20), tmp_path / "raw" / folder / "part", "csv")
    with pytest.raises(UserError, match=r"data\.split\.directories: .*'holdout', 'train'; .* train, training"):
        prepared(tmp_path / "prepared", tmp_path / "raw", directories=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": {"directories": True, "column": "s"}}, r'data\.split\.column: "s" is not allowed; .*directories'),
        ({"time": "t", "split": {"column": "s"}}, r'data\.time: "t" is not allowed; .* given split'),
        (
            {"split": {"column": "s", "validation_from": "2024-01-01", "test_from": "2024-02-01"}},
            r"data\.split\.validation_from: .* given split",
        ),
        ({"id": "s", "split": {"column": "s"}}, r'data\.split\.column: "s" is not allowed; expected another column'),
    ],
)
def test_settings_that_contradict_a_given_split_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig.from_dict(settings)


def test_new_files_join_a_base_set_as_in_one_go(tmp_path: Path) -> None:
    tables = [frame(200, seed) for seed in (0, 1)]
    for number, table in enumerate(tables):
        write(table, tmp_path / f"raw/{number}", "parquet")
    config = DataConfig(split=SplitConfig(column="split"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first/0.parquet").write_bytes((tmp_path / "raw/0.parquet").read_bytes())
    prepared(tmp_path / "base", tmp_path / "first", config=config)
    grown = prepared(tmp_path / "grown", tmp_path / "raw", config=replace(config, earlier=str(tmp_path / "base")))
    for split in SPLITS:
        assert values(grown, split) == sorted(expected(tables[0], split) + expected(tables[1], split))


def test_prepared_data_without_the_setting_are_those_of_before(tmp_path: Path) -> None:
    data = prepared(tmp_path / "prepared", frame())
    schema = json.loads((tmp_path / "prepared/schema.json").read_text())
    assert schema["settings"]["split"] == {
        "seed": 0,
        "test": 0.15,
        "test_from": "",
        "validation": 0.15,
        "validation_from": "",
    }
    assert "drawn" not in schema and data.artifact.files["schema.json"].size
