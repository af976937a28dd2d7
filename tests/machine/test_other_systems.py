"""The project works without the features that only Linux has."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.tables import table_text

#: Of ``os`` on Linux, what it lacks on macOS.
LINUX_ONLY = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "copy_file_range")

PROGRAM = """
import os, sys
from pathlib import Path
from slipstream.operations.doctor.node import read_node
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.source.config import DataConfig
from slipstream.pipeline.prepare.engine import prepare
import workflows.training

if __name__ == "__main__":
    assert not any(hasattr(os, name) for name in os.environ["GONE"].split())
    assert 1 <= usable_cores() <= os.cpu_count()
    rows = prepare(Path(sys.argv[1]), sys.argv[2], "y", DataConfig(), {}, workers=2).read_json("card.json")["rows"]
    print(rows["read"], *(reading.found for reading in read_node() if reading.what == "CPU"))
"""


def test_without_functions_of_linux_it_starts_and_prepares(tmp_path: Path) -> None:
    """``sitecustomize`` takes them away from every process, those of the pool too."""
    gone = [name for name in LINUX_ONLY if hasattr(os, name)]
    lines = "import os\nfor name in os.environ['GONE'].split():\n    delattr(os, name)\n"
    (tmp_path / "sitecustomize.py").write_text(lines)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "t.csv").write_text(table_text(400))
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path / "made", tmp_path / "t.csv"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "GONE": " ".join(gone)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"400 {os.cpu_count()} cores in the affinity mask")
