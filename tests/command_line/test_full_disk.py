"""A full disk at any write of the main job: one line of error, no partial output, and a run with room succeeds.

At each directory and suffix of a file that is opened for writing, one after the other.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.small_disk import on_a_small_disk, small_disks

__all__ = ["small_disks"]
#: Of each stage one of the files that have to be written.
WRITTEN = {".slipstream/prepare/.#.work/*.json.partial", ".slipstream/train/.#.work/*.safetensors"}


@pytest.mark.prove
@pytest.mark.usefixtures("small_disks")
def test_a_disk_that_is_full_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "large").mkdir()
    script = REPOSITORY / "tests/support/full_disk.py"
    arguments = (sys.executable, script, tmp_path / "disk", tmp_path / "large", tmp_path / "filled-for")
    ran = on_a_small_disk(tmp_path / "disk", *arguments, size="256m")
    assert ran.returncode == 0, ran.stderr
    *filled, with_room, elsewhere = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    # What may be missing, such as a chart that is kept, is written again by another run; the run ends well.
    wrong = [run for run in filled if run["hidden"] or run["traceback"] or (run["code"] and len(run["lines"]) != 1)]
    assert not wrong, "\n".join(f"{run['at']}: {run['hidden']} {run['lines']}\n{run['output']}" for run in wrong)
    assert all(run["at"] for run in filled)
    assert {run["at"] for run in filled if run["code"]} > WRITTEN
    assert with_room["code"] == elsewhere["code"] == 0 and with_room["promoted"] == [1]
    assert with_room["whole"] == elsewhere["whole"]
    assert {"prepare/train-00000.rows", "train/best.safetensors", "train/history.json"} <= with_room["whole"].keys()
