"""A table prepared by several machines equals that of a single machine, byte for byte."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare import shuffle
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.resolve import resolve_source
from slipstream.pipeline.prepare.sharded import merge_partitions, shares
from slipstream.pipeline.prepare.table import FittedTable, OpenedTable
from slipstream.shared.artifacts import exchange
from slipstream.shared.artifacts.exchange import SUMMARY, VALUE
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.typed_values import encode_value
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, SplitConfig
from slipstream.shared.source.files import list_source
from tests.support.proving import diagonal
from tests.support.shares import CONFIG, MADE_BY, on_several
from tests.support.wording import refuses, same_wording


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


@pytest.mark.parametrize(("write", "number"), diagonal([write_parquet, write_text], [3, 50, 1]))
def test_any_number_of_shares_gives_the_same_bytes(tmp_path: Path, write: Callable[[Path], Path], number: int) -> None:
    (tmp_path / "data").mkdir()
    data = str(write(tmp_path / "data"))
    alone = prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY)
    assert alone.read_json("card.json")["rows"]["quarantined"] in (5, 15)
    shared = on_several(tmp_path / "pods", data, number)
    assert shared.check_sha256().fingerprint == alone.fingerprint
    # Eight row groups in two files, and five small files of text.
    assert len(list((tmp_path / "pods").glob("opened/shares/*"))) == min(number, 8 if write is write_parquet else 5)


@pytest.mark.prove
def test_parts_are_the_same_on_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "PART_BYTES", 5000)
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    output = [prepare(tmp_path / f"by-{workers}", data, "y", CONFIG, MADE_BY, workers) for workers in (1, 2, 3)]
    assert len({each.fingerprint for each in output}) == 1 and "train-00000_00006.rows" in output[0].files


@pytest.mark.prove
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_parts_are_merged_in_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (shuffle, merge_partitions):
        monkeypatch.setattr(module, "PART_BYTES", 5000)
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    alone = prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY, workers=2)
    sizes = [record.size for name, record in alone.files.items() if name.endswith(".rows")]
    assert len(sizes) == 11 and max(sizes) < 1.5 * 5000
    shared = on_several(tmp_path / "pods", data, number)
    assert shared.check_sha256().fingerprint == alone.fingerprint
    assert len(list((tmp_path / "pods").glob("merged-*"))) == number
    # Who merges a partition is given what belongs to it, and no more.
    given = [
        list((tmp_path / "pods").glob(f"encoded-*/{merge_partitions.partition_directory(index)}/*.rows"))
        for index in range(number)
    ]
    assert sum(len({path.name for path in runs}) for runs in given) == len(sizes)
    assert sum(path.stat().st_size for runs in given for path in runs) == sum(sizes)


@pytest.mark.prove
def test_files_of_text_are_parsed_in_shares_of_about_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, rows in enumerate([10, 10, 3000, 10, 500, 500, 500, 0]):
        lines = "".join(f"{number}-{row},{row % 7},{row % 2}\n" for row in range(rows))
        (tmp_path / f"data/{number}.csv").write_text("id,x,y\n" + lines)
    data = str(tmp_path / "data")
    shared = on_several(tmp_path / "pods", data, 3)
    assert shared.fingerprint == prepare(tmp_path / "alone", data, "y", CONFIG, MADE_BY).fingerprint
    files_of_shares = [
        [file.name for file in exchange.read_part(path, shares.TextShare).plan.files]
        for path in sorted((tmp_path / "pods").glob("texts/*"))
    ]
    assert files_of_shares == [["0.csv", "1.csv"], ["2.csv"], ["3.csv", "4.csv", "5.csv", "6.csv", "7.csv"]]
    # More shares than files: the last one, a file by itself, has no row.
    assert on_several(tmp_path / "many", data, 50).fingerprint == shared.fingerprint
    last = max((tmp_path / "many").glob("opened/shares/*"))
    assert exchange.read_part(last, shares.Share).units == []
    # What was parsed stays where it is: the shares of the table are small.
    assert not list((tmp_path / "pods").glob("opened/shares/*/*.arrow")) and not list(
        (tmp_path / "pods").glob("opened/spools/*")
    )


@pytest.mark.parametrize("settings", [{}, {"split": SplitConfig(validation_from="2024-03-01", test_from="2024-05-01")}])
def test_text_that_is_split_by_time_is_parsed_in_shares_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(3)
    for file in range(4):
        days = [f"2024-{month:02d}-{day:02d}" for month, day in draw.integers([1, 1], [7, 29], (400, 2))]
        lines = "".join(f"{day},{x:.3f},{int(x > 0)}\n" for day, x in zip(days, draw.normal(size=400), strict=True))
        (tmp_path / f"data/{file}.csv").write_text("day,x,y\n" + lines)
    data, config = str(tmp_path / "data"), DataConfig(time="day", **settings)
    shared = on_several(tmp_path / "pods", data, 3, config)
    assert shared.fingerprint == prepare(tmp_path / "alone", data, "y", config, MADE_BY).fingerprint
    assert not list((tmp_path / "pods").glob("opened/spools/*")), "it was read again"


@pytest.mark.prove
def test_a_column_that_turns_into_text_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = write_text(tmp_path / "data")
    (data / "5.csv").write_text("id,x,y\n" + "".join(f"5-{row},none given,a\n" for row in range(300)))
    # Numbers of one kind in some files and of another in others are what they are together.
    (data / "6.csv").write_text("id,x,y\n" + "".join(f"6-{row},{row},a\n" for row in range(300)))
    shared = on_several(tmp_path / "pods", str(data), 3)
    assert shared.fingerprint == prepare(tmp_path / "alone", str(data), "y", CONFIG, MADE_BY).fingerprint
    same_wording("".join(shared.read_json("card.json")["warnings"]))
    (data / "5.csv").unlink()
    shared = on_several(tmp_path / "numbers", str(data), 3)
    assert shared.fingerprint == prepare(tmp_path / "also", str(data), "y", CONFIG, MADE_BY).fingerprint


def test_texts_in_class_folders_are_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.shared.source.documents.BLOCK_FILES", 25)
    for number in range(100):
        folder = tmp_path / "data" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(f"text number {number} of {number % 7}")
    data, config = str(tmp_path / "data"), DataConfig(text_length=16)
    alone = prepare(tmp_path / "alone", data, "", config, MADE_BY)
    assert on_several(tmp_path / "pods", data, 3, config, target="").fingerprint == alone.fingerprint
    assert len(list((tmp_path / "pods").glob("opened/shares/*"))) == 3


@pytest.mark.parametrize("write", [write_parquet, write_text])
def test_new_files_beside_an_earlier_set_are_shared_too(tmp_path: Path, write: Callable[[Path], Path]) -> None:
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
    assert len(list((tmp_path / "pods").glob("opened/shares/*"))) == 3
    assert shared.fingerprint == prepare(tmp_path / "alone", str(data), "y", config, MADE_BY).fingerprint
    assert shared.files.keys() >= {"train-00000.rows", "train-00001.rows"}


def test_how_the_work_is_divided(tmp_path: Path) -> None:
    output: dict[str, Path] = {}
    for name, write in (("parquet", write_parquet), ("text", write_text)):
        (tmp_path / name).mkdir()
        output[name] = write(tmp_path / name)
    (tmp_path / "documents/good").mkdir(parents=True)
    (tmp_path / "documents/good/1.txt").write_text("fine")
    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/1.png").write_bytes(b"\x89PNG")

    def divided(data: str | Path, target: str = "y", config: DataConfig = CONFIG) -> str:
        return resolve_source(list_source(str(data)), target, config).division

    assert divided("", "", DataConfig()) == divided(tmp_path / "images", "", DataConfig()) == "none"
    assert divided(output["parquet"]) == divided(tmp_path / "documents", "", DataConfig()) == "units"
    assert divided(output["text"]) == "files"
    prepare(tmp_path / "earlier", str(output["text"]), "y", CONFIG, MADE_BY)
    beside = replace(CONFIG, earlier=str(tmp_path / "earlier"))
    assert divided(output["text"], config=beside) == "none", "there is nothing new"
    (output["text"] / "new.csv").write_text("id,x,y\n1,0.5,a\n")
    assert divided(output["text"], config=beside) == "files"


def test_a_users_mistake_is_said_by_the_step_that_finds_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = str(write_parquet(tmp_path / "data"))
    with refuses(UserError):
        on_several(tmp_path / "unknown", data, 2, target="z")
    with refuses(UserError):
        on_several(tmp_path / "pods", data, 2, DataConfig(id="id", quarantine_limit=0.001))


@dataclass(frozen=True)
class Value:
    """Something to exchange."""

    number: int


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_what_was_changed_on_its_way_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "run.rows").write_bytes(b"records")
    part = exchange.write_part(tmp_path / "part", Value(1), [tmp_path / "run.rows"])
    assert exchange.read_part(part, Value) == Value(1)
    for name in (VALUE, "run.rows"):
        raw = (part / name).read_bytes()
        (part / name).unlink()  # the original stays unchanged
        (part / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(DamagedArtifact, match=name):
            exchange.read_part(part, Value)
        (part / name).write_bytes(raw)


def test_a_value_that_is_not_there_is_missed(tmp_path: Path) -> None:
    part = exchange.write_part(tmp_path / "part")
    with refuses(DamagedArtifact, match=f"{VALUE}:"):
        exchange.read_part(part, Value)


def test_a_value_of_something_else_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    """With a manifest that fits, as somebody who can write to the store would make it."""
    raw = encode_value(Value(1), Value)
    forged = {
        "pickle": pickle.dumps(Payload(f"touch {tmp_path / 'ran'}")),
        "pickle-in-json": raw.replace(b'{"number":1}', b"cos\nsystem\n"),
        "other-class": encode_value(shares.ScannedShare([]), shares.ScannedShare),
        "other-field": raw.replace(b'"number"', b'"system"'),
        "other-type": encode_value({"number": "1"}, dict[str, str]),
    }
    pickle.loads(forged["pickle"])
    assert (tmp_path / "ran").exists(), "the payload does nothing"
    (tmp_path / "ran").unlink()
    for name, content in forged.items():
        (tmp_path / "from" / name).mkdir(parents=True)
        (tmp_path / "from" / name / VALUE).write_bytes(content)
        part = exchange.write_part(tmp_path / name, files=[tmp_path / "from" / name / VALUE])
        with pytest.raises(DamagedArtifact, match=f"{name}/{VALUE}: .*expected Value") as error:
            exchange.read_part(part, Value)
        assert "\n" not in error.value.message and not (tmp_path / "ran").exists()


def test_every_step_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    """A pickle in the place of each value that the steps exchange."""
    (tmp_path / "data").mkdir()
    on_several(tmp_path / "pods", str(write_text(tmp_path / "data")), 2)
    (tmp_path / VALUE).write_bytes(pickle.dumps(Payload(f"touch {tmp_path / 'ran'}")))
    values = sorted((tmp_path / "pods").rglob(VALUE))
    assert len(values) >= 13
    for value in values:
        shutil.rmtree(value.parent)
        exchange.write_part(value.parent, files=[tmp_path / VALUE])
    pods = tmp_path / "pods"
    share, spool, plan = pods / "opened/shares/00000-downloaded", pods / "spool", pods / "plan-downloaded"
    exchange.write_part(spool)
    parsed, merged = pods / "parsed-0-downloaded", pods / "merged-0-downloaded"
    source, new = resolve_source(list_source(str(tmp_path / "data")), "y", CONFIG), tmp_path / "new"
    for step in (
        lambda: shares.parse_share(pods / "texts/00000-downloaded", new),
        lambda: shares.open_shares(source, 2, [parsed / SUMMARY], new),
        lambda: shares.scan_share(share, spool, new),
        lambda: shares.fit_shares(pods / "opened/table-downloaded", [], 2, new / "fitted", new / "plan"),
        lambda: shares.encode_share(share, spool, pods / "scanned-0-downloaded", plan, new),
        lambda: merge_partitions.merge_partition(0, plan, [], new),
        lambda: merge_partitions.s3_parts(merged / SUMMARY, "s3://bucket/from", "s3://bucket/to"),
        lambda: merge_partitions.assemble_artifact(new, MADE_BY, pods / "fitted-downloaded", []),
    ):
        with refuses(DamagedArtifact, match=f"{VALUE}:"):
            step()
    assert not (tmp_path / "ran").exists() and not new.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", ""])
def test_a_value_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    with refuses(DamagedArtifact):
        exchange.path_in(tmp_path, name)


def test_values_that_are_exchanged_come_back_equal(tmp_path: Path) -> None:
    """What the codec's tests say of all types, for those of a real table: text, numbers, times and bad rows."""
    (tmp_path / "data").mkdir()
    on_several(tmp_path / "pods", str(write_parquet(tmp_path / "data")), 2)
    kinds: dict[str, type[Any]] = {
        "opened/table-downloaded": OpenedTable,
        "opened/shares/00000-downloaded": shares.Share,
        "scanned-0-downloaded": shares.ScannedShare,
        "fitted-downloaded": FittedTable,
        "plan-downloaded": merge_partitions.MergePlan,
        "encoded-0-downloaded/00000": merge_partitions.SortedRuns,
        "merged-0-downloaded/summary": merge_partitions.MergedParts,
    }
    for directory, kind in kinds.items():
        value = exchange.read_part(tmp_path / "pods" / directory, kind)
        assert encode_value(value, kind) == (tmp_path / "pods" / directory / VALUE).read_bytes()
