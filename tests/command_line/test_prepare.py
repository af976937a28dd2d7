"""``prepare`` on the command line: data card, prepared data and closing summary."""

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.shared.artifacts.prepared.data import PreparedData
from tests.support.command_line import Run, start_in

ROWS = 300


def table() -> str:
    """Return 300 rows: one has a letter for a number, another lacks its target."""
    lines = [f"{i % 17},{(i * 37) % 101},{'Oslo' if i % 3 else 'Rome'},{'yes' if i % 2 else 'no'}" for i in range(ROWS)]
    lines[100] = "x,5,Oslo,yes"
    lines[200] = "5,5,Oslo,"
    return "number,amount,city,bought\n" + "\n".join(lines) + "\n"


def test_the_prepared_data_the_card_and_what_is_in_them(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.csv").write_text(table())
    arguments = ("--data", "shop.csv", "--target", "bought", "--config", '{"training": {"epochs": 3}}')
    first = pyflyte_run(*arguments, workflow="prepare")
    assert first.returncode == 0, first.stdout
    (run,) = (tmp_path / "runs").iterdir()
    said = " ".join(first.stdout.split())
    for words in (
        "shop.csv → bought",
        "300 rows read, 298 kept, 2 quarantined",
        "1 row: not integer in column 'number' (first in shop.csv, line 102)",
        "1 row: the target is missing in column 'bought' (first in shop.csv, line 202)",
        "2 numeric, 1 categorical, 1 target",
        f"Card runs/{run.name}/card.html",
        f"Prepared runs/{run.name}/prepared",
    ):
        assert words in said, first.stdout
    data = PreparedData.open(run / "prepared")
    data.artifact.check_sha256()
    card = json.loads((run / "card.json").read_text())
    assert card == data.card and card["rows"]["kept"] == sum(
        len(data.split(s)) for s in ("train", "validation", "test")
    )
    assert (run / "card.html").read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob(".slipstream/prepare/*.checkpoints")), "unfinished work outlived the finished"

    # The section `training` is not the data's: nothing is made again.
    second = pyflyte_run("--data", "shop.csv", "--target", "bought", workflow="prepare")
    assert second.returncode == 0 and "prepare      reused" in second.stdout, second.stdout


def test_columns_of_any_type_are_used_or_set_aside_with_a_word(pyflyte_run: Run, tmp_path: Path) -> None:
    counted = range(ROWS)
    columns = {
        "huge": pa.array([2**63 + i for i in counted], pa.uint64()),
        "largest": pa.array([2**64 - 1, 2**63] * (ROWS // 2), pa.uint64()),
        "half": pa.array([i % 7 / 4 for i in counted], pa.float16()),
        "amount": pa.array([i % 9 for i in counted], pa.decimal256(60, 3)),
        "list": pa.array([[i] for i in counted]),
        "struct": pa.array([{"a": i} for i in counted]),
        "nothing": pa.nulls(ROWS),
        "bytes": pa.array([b"x", b"y"] * (ROWS // 2)),
        "clock": pa.array([i % 60 for i in counted], pa.time32("s")),
        "elapsed": pa.array([i % 60 for i in counted], pa.duration("s")),
        "when": pa.array([i * 86_400 for i in counted], pa.timestamp("s", "Europe/Oslo")),
        "view": pa.array(["a", "b", "c"] * (ROWS // 3), pa.string_view()),
        "y": pa.array([i % 2 for i in counted], pa.uint8()),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    result = pyflyte_run("--data", "t.parquet", "--target", "y", workflow="prepare")
    assert result.returncode == 0 and "Traceback" not in result.stdout, result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    card = json.loads((run / "card.json").read_text())
    used = {column["name"] for column in card["columns"] if column["role"] in ("numeric", "categorical")}
    aside = {"list", "struct", "nothing", "bytes", "clock", "elapsed"}
    assert used | {"y"} | aside | {"huge"} == columns.keys()
    assert all(any(f"column {name!r} is not used" in word for word in card["warnings"]) for name in aside)


#: In a directory on the path of a process, this kills it in its last merge.
FAULT = """
import os, signal, sys, time
from pathlib import Path

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "slipstream.pipeline.prepare.engine":
            from slipstream.pipeline.prepare import shuffle
            merge = shuffle.write_merged_part
            def faulty(writer, name, *arguments):
                if name.startswith("test"):
                    os.kill(os.getpid(), signal.SIGKILL)
                merge(writer, name, *arguments)
            shuffle.write_merged_part = faulty

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.prove
def test_a_killed_prepare_goes_on_when_it_is_started_again(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.csv").write_text(table())
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault/sitecustomize.py").write_text(FAULT)
    arguments = ("--data", "shop.csv", "--target", "bought")
    killed = start_in(tmp_path, *arguments, workflow="prepare", PYTHONPATH=str(tmp_path / "fault"))
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob(".slipstream/prepare/*/manifest.json"))

    again = pyflyte_run(*arguments, workflow="prepare")
    assert again.returncode == 0, again.stdout
    # The file as columns, its scan, its encoding and two splits; the third was left.
    assert "prepare      resumes: 5 units of work were done" in again.stdout
    (made,) = (tmp_path / ".slipstream/prepare").iterdir()
    (tmp_path / ".slipstream").rename(tmp_path / "before")
    whole = pyflyte_run(*arguments, workflow="prepare")
    assert whole.returncode == 0 and "goes on" not in whole.stdout
    for path in (tmp_path / "before/prepare" / made.name).iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name
