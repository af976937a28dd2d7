import functools
from pathlib import Path

import pytest

from tests.support.command_line import Run, run_in


@pytest.fixture
def pyflyte_run(tmp_path: Path) -> Run:
    """``pyflyte_run("--data", "x.csv", ...)`` is :func:`run_in` the test's own directory."""
    return functools.partial(run_in, tmp_path)
