"""The workflow that measures the interconnect alone."""

from __future__ import annotations

import re
from pathlib import Path

from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from tests.support import REPOSITORY
from tests.support.command_line import invoke

SMALL = '{"operations": ["all_reduce"], "smallest": 1024, "largest": 4096, "budget": 0.001}'


def test_its_result_is_a_table_to_read(tmp_path: Path) -> None:
    workflow = REPOSITORY / "workflows/collectives.py"
    ended = invoke(pyflyte, tmp_path, ["run", str(workflow), "measure_collectives", "--config", SMALL], {})
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.splitlines()
    assert any(line.startswith("2 processes, gloo, cpu, torch ") for line in lines)
    assert [re.split(r"\s+", line)[1] for line in lines if line.startswith("all_reduce ")] == ["1024", "4096"]
