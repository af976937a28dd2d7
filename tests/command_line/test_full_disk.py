"""A disk that is full whenever a stage writes: one line, nothing half-written, and with room the next run goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.full_disk import STAGES
from tests.support.small_disk import on_a_small_disk, small_disks

__all__ = ["small_disks"]
#: Pages of 4 KiB that are left when a stage begins to write.
ROOMS = ("0", "2")


@pytest.mark.prove
@pytest.mark.usefixtures("small_disks")
def test_a_disk_that_is_full_whenever_a_stage_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "large").mkdir()
    script = REPOSITORY / "tests/support/full_disk.py"
    arguments = (sys.executable, script, tmp_path / "disk", tmp_path / "large", *ROOMS)
    ran = on_a_small_disk(tmp_path / "disk", *arguments, size="256m")
    assert ran.returncode == 0, ran.stderr
    *filled, with_room, elsewhere = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [(run["stage"], run["pages"]) for run in filled] == [
        (stage, int(room)) for stage in STAGES for room in ROOMS
    ]
    for run in filled:
        assert not run["hidden"], run
        if run["code"]:
            assert run["filled"] and len(run["lines"]) == 1 and not run["traceback"], run
            assert run["runs"] == 0 or run["stage"] == "report", run
        else:
            assert run["pages"], run
    assert {run["stage"] for run in filled if run["code"]} == set(STAGES)
    assert with_room["code"] == elsewhere["code"] == 0 and with_room["promoted"] == [1]
    assert with_room["whole"] == elsewhere["whole"]
    assert {"prepare/train-00000.rows", "train/best.safetensors", "train/history.json"} <= with_room["whole"].keys()
