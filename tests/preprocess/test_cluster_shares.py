"""A table prepared by several machines is, byte for byte, the one that a single machine prepares."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.artifacts.format import Artifact, DamagedArtifact
from tasks.errors import UserError
from tasks.preprocess.cluster import csv_parsing, merge_partitions, shares
from tasks.preprocess.cluster.exchange import SAID, VALUE, hand_over, take_over
from tasks.preprocess.config import DataConfig, SplitConfig
from tasks.preprocess.engine import prepare
from tasks.preprocess.read.files import list_source
from tasks.preprocess.shuffle import sorted_runs

CONFIG = DataConfig(id="id", quarantine_limit=0.05)
MADE_BY = {"code": "this"}


def write_parquet(directory: Path) -> Path:
    draw = np.random.default_rng(0)
    for file in range(2):
        rows = 1500
        x = draw.normal(size=rows)
        x[::100] = np.inf if file else np.nan
        table = pa.table(
            {
                "id": np.arange(rows) + file * rows,
                "x": x,
                "c": draw.choice(list("abcd"), rows),
                "y": draw.integers(0, 2, rows),
            }
        )
        pq.write_table(table, directory / f"{file}.parquet", row_group_size=400)
    return directory


def write_text(directory: Path) -> Path:
    draw = np.random.default_rng(1)
    for file in range(5):
        rows = [f"{file}-{i},{x:.4f},{'ab'[i % 2]}{',' if i == 7 else ''}" for i, x in enumerate(draw.normal(size=300))]
        (directory / f"{file}.csv").write_text("id,x,y\n" + "\n".join(rows) + "\n")
    return directory


def on_several(root: Path, data: str, number: int, config: DataConfig = CONFIG, target: str = "y") -> Artifact:
    """As the pods do it: each step in directories of its own, and the places that it read moved before the next."""

    def moved(path: Path) -> Path:
        return Path(shutil.move(path, path.with_name(f"{path.name}-downloaded")))

    root.mkdir()
    listed = list_source(data)
    opened = [
        moved(lot) for lot in csv_parsing.open_texts(listed, target, config, number, lambda i: root / f"texts-{i}")
    ]
    for index, lot in enumerate(opened):
        csv_parsing.parse_lot(lot, root / f"parsed-{index}")
    parsed = [moved(root / f"parsed-{index}") for index in range(len(opened))]
    made, spools = shares.open_shares(
        listed,
        target,
        config,
        "",
        number,
        [directory / SAID for directory in parsed],
        root / "table",
        lambda index: root / f"share-{index}",
        lambda index: root / f"spool-{index}",
    )
    table, made, spools = moved(root / "table"), [moved(share) for share in made], [*map(moved, spools)] or parsed
    for index, (share, spool) in enumerate(zip(made, spools, strict=True)):
        shares.survey_share(share, spool, root / f"surveyed-{index}")
    surveyed = [moved(root / f"surveyed-{index}") for index in range(len(made))]
    count = shares.fit_shares(table, surveyed, number, root / "found", root / "plan")
    plan = moved(root / "plan")
    for index, (share, spool) in enumerate(zip(made, spools, strict=True)):
        shares.encode_share(share, spool, surveyed[index], plan, root / f"encoded-{index}")
    encoded = [moved(root / f"encoded-{index}") for index in range(len(made))]
    for lot in range(count):
        merge_partitions.merge_lot(
            lot, plan, [share / merge_partitions.name_of(lot) for share in encoded], root / f"merged-{lot}"
        )
    merged = [part for lot in range(count) for part in merge_partitions.parts_in(moved(root / f"merged-{lot}"))]
    merge_partitions.assemble(
        root / "prepared",
        listed,
        target,
        config,
        MADE_BY,
        moved(root / "found"),
        merged,
    )
    assert not [path for path in root.rglob("*") if path.name.endswith((".work", ".scratch"))]
    return Artifact.open(root / "prepared", "prepare")


@pytest.mark.parametrize("number", [1, 3, 50])
@pytest.mark.parametrize("write", [write_parquet, write_text])
def test_any_number_of_shares_gives_the_same_bytes(tmp_path: Path, write, number: int) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "data").mkdir()
    data = str(write(tmp_path / "data"))
    alone = prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY)
    assert alone.read_json("card.json")["rows"]["quarantined"] in (5, 15)
    shared = on_several(tmp_path / "pods", data, number)
    assert shared.check_sha256().fingerprint == alone.fingerprint
    # Eight row groups in two files, and five small files of text.
    assert len(list((tmp_path / "pods").glob("share-*"))) == min(number, 8 if write is write_parquet else 5)


def test_parts_are_the_same_on_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "PART_BYTES", 5000)
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    made = [prepare(tmp_path / f"by-{workers}", data, "y", CONFIG, MADE_BY, workers) for workers in (1, 2, 3)]
    assert len({each.fingerprint for each in made}) == 1 and "train-00000_00006.rows" in made[0].files


@pytest.mark.parametrize("number", [2, 4])
def test_parts_are_merged_in_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (sorted_runs, merge_partitions):
        monkeypatch.setattr(module, "PART_BYTES", 5000)
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    alone = prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY, workers=2)
    sizes = [record.size for name, record in alone.files.items() if name.endswith(".rows")]
    assert len(sizes) == 11 and max(sizes) < 1.5 * 5000
    shared = on_several(tmp_path / "pods", data, number)
    assert shared.check_sha256().fingerprint == alone.fingerprint
    assert len(list((tmp_path / "pods").glob("merged-*"))) == number
    # Who merges a lot is given what belongs to it, and no more.
    given = [
        list((tmp_path / "pods").glob(f"encoded-*/{merge_partitions.name_of(lot)}/*.rows")) for lot in range(number)
    ]
    assert sum(len({path.name for path in lot}) for lot in given) == len(sizes)
    assert sum(path.stat().st_size for lot in given for path in lot) == sum(sizes)


def test_files_of_text_are_parsed_in_lots_of_about_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, rows in enumerate([10, 10, 3000, 10, 500, 500, 500, 0]):
        lines = "".join(f"{number}-{row},{row % 7},{row % 2}\n" for row in range(rows))
        (tmp_path / f"data/{number}.csv").write_text("id,x,y\n" + lines)
    data = str(tmp_path / "data")
    shared = on_several(tmp_path / "pods", data, 3)
    assert shared.fingerprint == prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY).fingerprint
    lots_of_files = [
        [file.name for file in take_over(path).plan.files] for path in sorted((tmp_path / "pods").glob("texts-*"))
    ]
    assert lots_of_files == [["0.csv", "1.csv"], ["2.csv"], ["3.csv", "4.csv", "5.csv", "6.csv", "7.csv"]]
    # More lots than files: the last one, a file by itself, has no row.
    assert on_several(tmp_path / "many", data, 50).fingerprint == shared.fingerprint
    last = max((tmp_path / "many").glob("share-*"))
    assert take_over(last).units == []
    # What one lot has parsed is in no other part: the shares are small.
    assert not list((tmp_path / "pods").glob("share-*/*.arrow")) and not list((tmp_path / "pods").glob("spool-*"))


@pytest.mark.parametrize("settings", [{}, {"split": SplitConfig(validation_from="2024-03-01", test_from="2024-05-01")}])
def test_text_that_is_split_by_time_is_parsed_in_lots_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(3)
    for file in range(4):
        days = [f"2024-{month:02d}-{day:02d}" for month, day in draw.integers([1, 1], [7, 29], (400, 2))]
        lines = "".join(f"{day},{x:.3f},{int(x > 0)}\n" for day, x in zip(days, draw.normal(size=400), strict=True))
        (tmp_path / f"data/{file}.csv").write_text("day,x,y\n" + lines)
    data, config = str(tmp_path / "data"), DataConfig(time="day", **settings)
    shared = on_several(tmp_path / "pods", data, 3, config)
    assert shared.fingerprint == prepare(tmp_path / "alone", data, "y", config, MADE_BY).fingerprint
    assert not list((tmp_path / "pods").glob("spool-*")), "it was read again"


def test_a_column_that_turns_into_text_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = write_text(tmp_path / "data")
    (data / "5.csv").write_text("id,x,y\n" + "".join(f"5-{row},none given,a\n" for row in range(300)))
    # Numbers of one kind in some files and of another in others are what they are together.
    (data / "6.csv").write_text("id,x,y\n" + "".join(f"6-{row},{row},a\n" for row in range(300)))
    shared = on_several(tmp_path / "pods", str(data), 3)
    assert shared.fingerprint == prepare(tmp_path / "alone", str(data), "y", CONFIG, MADE_BY).fingerprint
    assert "so it is taken as text" in "".join(shared.read_json("card.json")["warnings"])
    (data / "5.csv").unlink()
    shared = on_several(tmp_path / "numbers", str(data), 3)
    assert shared.fingerprint == prepare(tmp_path / "also", str(data), "y", CONFIG, MADE_BY).fingerprint


def test_texts_in_class_folders_are_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.preprocess.read.text_folders.BLOCK_FILES", 25)
    for number in range(100):
        folder = tmp_path / "data" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(f"text number {number} of {number % 7}")
    data, config = str(tmp_path / "data"), DataConfig(text_length=16)
    alone = prepare(tmp_path / "alone", data, "", config, MADE_BY)
    assert on_several(tmp_path / "pods", data, 3, config, target="").fingerprint == alone.fingerprint
    assert len(list((tmp_path / "pods").glob("share-*"))) == 3


def test_images_have_one_share(tmp_path: Path) -> None:
    shared = on_several(tmp_path / "pods", "", 4, DataConfig())
    assert shared.fingerprint == prepare(tmp_path / "alone", "", "y", DataConfig(), MADE_BY).fingerprint


@pytest.mark.parametrize("write", [write_parquet, write_text])
def test_new_files_beside_an_earlier_set_are_shared_too(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data")
    files = sorted(data.iterdir())
    for file in files[1:]:
        file.rename(tmp_path / file.name)
    prepare(tmp_path / "earlier", str(data), "y", CONFIG, MADE_BY)
    for file in files[1:]:
        (tmp_path / file.name).rename(file)
    config = replace(CONFIG, earlier=str(tmp_path / "earlier"))
    shared = on_several(tmp_path / "pods", str(data), 3, config)
    assert len(list((tmp_path / "pods").glob("share-*"))) == 3
    assert shared.fingerprint == prepare(tmp_path / "alone", str(data), "y", config, MADE_BY).fingerprint
    assert shared.files.keys() >= {"train-00000.rows", "train-00001.rows"}


def test_an_earlier_set_to_which_nothing_is_new_is_left_to_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = str(write_text(tmp_path / "data"))
    earlier = prepare(tmp_path / "earlier", data, "y", CONFIG, MADE_BY)
    again = on_several(tmp_path / "pods", data, 3, replace(CONFIG, earlier=str(tmp_path / "earlier")))
    assert again.fingerprint == earlier.fingerprint
    assert len(list((tmp_path / "pods").glob("share-*"))) == 1


def test_a_users_mistake_is_said_by_the_step_that_finds_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    with pytest.raises(UserError, match=r"no column 'z'"):
        on_several(tmp_path / "unknown", data, 2, target="z")
    with pytest.raises(UserError, match=r"15 of 3,000 rows .* cannot be used"):
        on_several(tmp_path / "pods", data, 2, DataConfig(id="id", quarantine_limit=0.001))


def test_a_part_that_was_changed_on_its_way_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "run.rows").write_bytes(b"records")
    part = hand_over(tmp_path / "part", {"a": 1}, [tmp_path / "run.rows"])
    assert take_over(tmp_path / "part") == {"a": 1}
    for name in (VALUE, "run.rows"):
        raw = part.path(name).read_bytes()
        part.path(name).unlink()  # the original stays as it is
        part.path(name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(DamagedArtifact, match=name):
            take_over(tmp_path / "part")
        part.path(name).write_bytes(raw)
