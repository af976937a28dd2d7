"""A really full disk: one line of error, no trust in partial files, and with space the same command succeeds.

The disk is a small tmpfs, mounted in a namespace of the test's own.
"""

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from slipstream.config import RunConfig
from slipstream.shared.errors import UserError
from slipstream.shared.storage import local
from tasks.prepare import list_data, open_shares
from tests.support.small_disk import on_a_small_disk, small_disks
from tests.support.wording import refuses, same_wording

__all__ = ["small_disks"]

#: Prepares on a small disk that something else fills as soon as a function is called; then makes room and tries again.
ATTEMPTS = """
import errno, json, sys
from pathlib import Path
from slipstream.shared.artifacts import format
from slipstream.shared.errors import UserError
from slipstream.pipeline.prepare import engine
from slipstream.shared.source.config import DataConfig

data, disk, where, workers = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
owner, name = {
    "encode": (engine, "encode_units"),
    "open": (engine, "open_table"),
    "merge": (engine, "merge_all"),
    "card": (engine, "write_table"),
    "manifest": (format.ArtifactWriter, "write_manifest"),
}[where]
filler = disk / "filler"

def fill():
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        if where != "manifest":  # which is small
            file.truncate(file.tell() - (1 << 12))  # so that something can be half-written

def prepare(directory):
    return engine.prepare(disk / directory, data, "y", DataConfig(), {}, workers, disk / "kept")

if __name__ == "__main__":
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: (fill(), original(*a, **k))[1])
    try:
        prepare("first")
        message = "nothing"
    except UserError as error:
        message = error.message
    setattr(owner, name, original)
    left = sorted(path.name for path in (disk / "first").iterdir())
    filler.unlink()
    kept = (disk / "kept").exists()
    made = [prepare(directory).check_sha256().fingerprint for directory in ("again", "whole")]
    print(json.dumps({"message": message, "left": left, "kept": kept, "same": made[0] == made[1]}))
"""


def test_a_full_pod_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of several pods it was."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slipstream.pipeline.prepare.sharded.shares.open_shares", full)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    listing = list_data.task_function(data="t.csv", target="y", config=RunConfig()).listing
    with refuses(UserError):
        open_shares.task_function(listing=listing, number=2, parsed=[])


def test_of_several_directories_on_a_full_disk_the_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other processes write while the free space is measured."""
    free = iter([3 << 20, 2 << 20, 1 << 20])
    monkeypatch.setattr(local, "free_bytes", lambda _: next(free))
    assert local.fullest([tmp_path / "a", tmp_path, tmp_path / "b/c"]) == tmp_path / "a"


@pytest.mark.usefixtures("small_disks")
@pytest.mark.parametrize(
    "where",
    [
        "manifest",
        *(
            pytest.param(name, marks=pytest.mark.prove)
            for name in ("encode by workers", "open", "encode", "merge", "card")
        ),
    ],
)
def test_a_full_disk_is_said_and_then_forgotten(tmp_path: Path, where: str) -> None:
    draw = np.random.default_rng(0)
    table = pa.table({**{f"x{i}": draw.normal(size=10_000) for i in range(10)}, "y": draw.integers(0, 2, 10_000)})
    data = tmp_path / ("t.csv" if where == "open" else "t.parquet")
    if where == "open":
        pacsv.write_csv(table, data)
    else:
        pq.write_table(table, data, row_group_size=2500)
    script = tmp_path / "attempts.py"
    script.write_text(ATTEMPTS)  # a file, because workers import it themselves
    step, _, by = where.partition(" by ")
    arguments = (script, data, tmp_path / "disk", step, "2" if by else "1")
    ran = on_a_small_disk(tmp_path / "disk", sys.executable, *arguments)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    same_wording(result["message"])
    assert "manifest.json" not in result["left"] and not result["kept"]
    assert result["same"]
