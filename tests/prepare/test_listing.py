"""The source is listed once: the fingerprinted files are read, and changes meanwhile are errors."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import feather

from slipstream.pipeline.prepare import engine
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.resolve import SourceToPrepare, resolve_source
from slipstream.pipeline.prepare.sharded import shares
from slipstream.shared.artifacts import exchange
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from slipstream.shared.storage import s3
from tests.support.faulty_s3 import FaultyS3
from tests.support.proving import first_few
from tests.support.shares import on_several
from tests.support.tables import table_text
from tests.support.wording import refuses


def rows_read(artifact: Artifact) -> int:
    return artifact.read_json("card.json")["rows"]["read"]


def beside(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> list[str]:
    """Let ``act`` happen right after the engine called ``name``; what happened."""
    happened: list[str] = []
    original = getattr(engine, name)

    def then(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        act()
        happened.append(name)
        return result

    monkeypatch.setattr(engine, name, then)
    return happened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "first.csv").write_text(table_text(400))
    return directory


def test_a_file_that_lands_while_data_is_read_is_new_the_next_night(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = table_text(400, seed=1)
    happened = beside(monkeypatch, "open_table", lambda: (folder / "late.csv").write_text(late))
    first = prepare(tmp_path / "first", str(folder), "y", DataConfig(), {})
    assert happened and rows_read(first) == 400
    assert first.read_json("schema.json")["sources"][0]["files"] == [
        ["first.csv", (folder / "first.csv").stat().st_size]
    ]
    monkeypatch.undo()
    night = prepare(tmp_path / "night", str(folder), "y", DataConfig(earlier=str(tmp_path / "first")), {})
    assert rows_read(night) == 800


def test_a_home_that_the_shell_left_in_an_option_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    for given in ("~/data", "~/data/*.csv", "~/data/first.csv"):
        assert [Path(file.uri) for file in list_source(given).files] == [folder / "first.csv"]
    with refuses(UserError):
        list_source("~unknown-user/data")


def overwrite(path: Path) -> None:
    path.write_text(table_text(400, seed=2))


def replace_by_another(path: Path) -> None:
    """A file of the same size and modification time: another inode tells."""
    status = path.stat()
    other = path.with_name(".other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [overwrite, replace_by_another, Path.unlink])
@pytest.mark.parametrize("moment", ["open_table", "merge_all"])
def test_a_file_that_changes_while_it_is_read_is_one_line_and_leaves_no_artifact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], moment: str
) -> None:
    happened = beside(monkeypatch, moment, lambda: change(folder / "first.csv"))
    with refuses(UserError, match=r"first\.csv:"):
        prepare(tmp_path / "made", str(folder), "y", DataConfig(), {})
    assert happened and not (tmp_path / "made" / "manifest.json").exists()


def test_bytes_that_change_after_the_fingerprint_are_not_stored_under_it(folder: Path, tmp_path: Path) -> None:
    listing = list_source(str(folder))
    fingerprint_source(listing, "y")
    overwrite(folder / "first.csv")
    with refuses(UserError):
        prepare(tmp_path / "made", listing, "y", DataConfig(), {})


def test_what_goes_wrong_because_a_file_changed_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": np.arange(600.0), "y": np.arange(600) % 2}), path, row_group_size=100)
    beside(monkeypatch, "open_table", lambda: path.write_bytes(path.read_bytes()[:2000]))
    with refuses(UserError):
        prepare(tmp_path / "made", str(path), "y", DataConfig(), {})


def parquet(path: Path, *names: str, groups: int = 6) -> None:
    """Write atomically a Parquet file with the columns ``names`` and y, in ``groups`` row groups."""
    rows = 100 * groups
    columns = {name: np.arange(float(rows)) for name in names}
    pq.write_table(pa.table({**columns, "y": np.arange(rows) % 2}), path.with_suffix(".new"), row_group_size=100)
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("replaced", [{"groups": 2}, {"names": ("x",)}, {"names": ()}])
@pytest.mark.parametrize("moment", ["open_table", "fit_table"])
def test_another_file_in_the_place_of_one_is_one_line_whatever_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, replaced: dict[str, Any]
) -> None:
    """Row groups and columns that are no longer there."""
    parquet(tmp_path / "t.parquet", "x", "z")
    request = {"names": ("x", "z"), **replaced}
    names = request.pop("names")
    happened = beside(monkeypatch, moment, lambda: parquet(tmp_path / "t.parquet", *names, **request))
    with refuses(UserError, match=r"t\.parquet:"):
        prepare(tmp_path / "made", str(tmp_path / "t.parquet"), "y", DataConfig(), {})
    assert happened


@pytest.mark.parametrize(
    ("suffix", "work"),
    [
        *itertools.product(("csv", "parquet", "arrow", "txt", "png"), ("fingerprint", "prepare")),
        *itertools.product(("csv", "parquet", "arrow", "txt"), ("several",)),
    ],
)
def test_a_file_that_was_removed_after_it_was_listed_is_one_line(tmp_path: Path, suffix: str, work: str) -> None:
    """The fingerprint, a decoding process or one of several machines finds it first."""
    data = tmp_path / "data"
    write_source(data, suffix)
    listing = list_source(str(data))
    last = Path(listing.files[-1].uri)
    target = "" if suffix in ("txt", "png") else "y"
    last.unlink()
    with refuses(UserError, match=f"{last.name}:"):
        if work == "fingerprint":
            fingerprint_source(listing, target)
        elif work == "prepare":
            prepare(tmp_path / "made", listing, target, DataConfig(), {})
        else:
            on_several(tmp_path / "pods", listing, 2, DataConfig(), target)


def write_source(data: Path, suffix: str) -> None:
    """Four files of a format; of texts and images, in two class folders."""
    for number in range(4):
        folder = data / ("ab"[number % 2] if suffix in ("txt", "png") else "")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}.{suffix}"
        if suffix == "csv":
            path.write_text(table_text(100, number))
        elif suffix == "parquet":
            parquet(path, "x")
        elif suffix == "arrow":
            feather.write_feather(pa.table({"x": np.arange(100.0), "y": np.arange(100) % 2}), path)
        elif suffix == "txt":
            path.write_text(f"the text of number {number}")
        else:
            Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(path)


@pytest.mark.parametrize(
    ("suffix", "step"),
    [("csv", "parse_share"), ("csv", "encode_share"), ("parquet", "scan_share"), ("parquet", "encode_share")],
)
def test_a_machine_that_reads_what_changed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, step: str
) -> None:
    write_source(tmp_path / "data", suffix)
    original, happened = getattr(shares, step), []

    def after_a_change(*arguments: Any) -> Any:
        for path in (tmp_path / "data").iterdir():
            write_other(path)
        happened.append(step)
        return original(*arguments)

    monkeypatch.setattr(shares, step, after_a_change)
    with refuses(UserError):
        on_several(tmp_path / "pods", list_source(str(tmp_path / "data")), 2, DataConfig(), "y")
    # Text is not read again once it is parsed: its change is found before the artifact is written.
    assert len(happened) == (2 if (suffix, step) == ("csv", "encode_share") else 1)
    assert not (tmp_path / "pods/prepared").exists()


def write_other(path: Path) -> None:
    if path.suffix == ".csv":
        path.write_text("a,b\n1,2\n")
    else:
        parquet(path, "other", groups=1)


def test_a_fingerprint_of_a_file_that_is_being_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = list_source(str(folder))
    with (folder / "first.csv").open("a") as writer:
        writer.write("1,Oslo,yes\n")
    with refuses(UserError):
        fingerprint_source(listing, "y")


def test_a_listing_survives_being_handed_on(folder: Path, tmp_path: Path) -> None:
    source = resolve_source(list_source(str(folder)), "y", DataConfig())
    handed_on = exchange.read_part(exchange.write_part(tmp_path / "handed on", source), SourceToPrepare)
    assert handed_on.listing == source.listing and handed_on.listing.files[0].version


@pytest.mark.parametrize("suffix", first_few(["csv", "parquet"], 1))
def test_s3_is_listed_once_and_every_read_is_of_the_listed_version(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"t.{suffix}"

    def put(seed: int) -> None:
        draw = np.random.default_rng(seed)
        if suffix == "csv":
            path.write_text(table_text(2000, seed))
        else:
            table = pa.table({"number": draw.normal(size=2000), "y": draw.integers(0, 2, 2000)})
            pq.write_table(table, path, row_group_size=500)
        s3.client().put_object(Bucket="bucket", Key=f"listed-{suffix}/once/{path.name}", Body=path.read_bytes())

    put(0)
    store.requests.clear()
    listing = list_source(f"s3://bucket/listed-{suffix}/once/")
    fingerprint_source(listing, "y")
    prepare(tmp_path / "made", listing, "y", DataConfig(), {})
    assert sum("list-type=2" in line for line in store.requests) == 1
    happened = beside(monkeypatch, "open_table", lambda: put(1))
    with refuses(UserError, match=rf"once/t\.{suffix}:"):
        prepare(tmp_path / "other", listing, "y", DataConfig(), {})
        # Text is read to its end before it is opened.
        prepare(tmp_path / "again", listing, "y", DataConfig(), {})
    assert happened
