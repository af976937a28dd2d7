"""Every benchmark runs: in the form of seconds, which shows that it works and not what anything costs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_the_quick_form_prints_and_writes_figures(benchmark: Path, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command: list[str | Path] = [sys.executable, benchmark, "--quick", "--json", target]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    written = json.loads(target.read_text())
    assert written["quick"] is True
    machine = written["machine"]
    first = ended.stdout.splitlines()[0]
    assert all(str(machine[key]) in first for key in ("cpu", "cores", "torch")), first
    assert written["tables"]
    for table in written["tables"]:
        assert table["title"] in ended.stdout and table["rows"]
        for row in table["rows"]:
            name, *figures = row.values()
            assert name in ended.stdout
            assert all(math.isfinite(figure) and figure >= 0 for figure in figures), row
            # All but what may be nothing in so short a run: what was lost or stood still.
            assert all(figure > 0 for key, figure in row.items() if key not in ("name", "stall")), row
