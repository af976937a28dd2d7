"""Every benchmark runs with ``--quick``, which takes seconds and measures nothing useful.

All but one in the process of the test, which has loaded what they need, and so has its fork server.
"""

import importlib
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import REPOSITORY, processes
from tests.support.proving import first_few

SECONDS = 300
#: What may be nothing in so short a run: what was lost, stood still or was preempted, and how far a forecast was off,
#: and a difference that the noise of so few steps hides.
MAY_BE_NOTHING = (
    *("stall", "preempted", "preempted_told", "lost", "lost_told", "off", "half", "save_s", "share"),
    *("marks", "marks_low", "marks_high", "others", "kills"),
    *("now", "limit"),  # class names with two meanings
    *("difference", "differ"),  # of an optimizer and of augmented images from their references
)
BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.py"))
#: The part of a sweep that starts no training, and what counts the work of a GPU, are all that `make test` has.
COUNTS = REPOSITORY / "benchmarks/gpu_readiness.py"
FORMS = [
    pytest.param(REPOSITORY / "benchmarks/sweep.py", ("simulated",), id="sweep, simulated"),
    *(pytest.param(path, (), id=path.stem, marks=[] if path == COUNTS else pytest.mark.prove) for path in BENCHMARKS),
]


@pytest.mark.parametrize(("benchmark", "parts"), first_few(FORMS, 1))
def test_the_quick_form_prints_and_writes_figures(benchmark: Path, parts: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    stdout = as_command(benchmark, target) if benchmark.stem == "startup" else in_process(benchmark, parts, target)
    written = json.loads(target.read_text())
    assert written["quick"] is True
    machine = written["machine"]
    first = stdout.splitlines()[0]
    assert all(str(machine[key]) in first for key in ("cpu", "cores", "torch")), first
    assert written["tables"]
    for table in written["tables"]:
        assert table["title"] in stdout and table["rows"]
        for row in table["rows"]:
            words = {key: value for key, value in row.items() if isinstance(value, str)}
            assert all(word in stdout for word in words.values())
            figures = {key: value for key, value in row.items() if key not in words}
            assert all(math.isfinite(figure) and figure >= 0 for figure in figures.values()), row
            assert all(figure > 0 for key, figure in figures.items() if key not in MAY_BE_NOTHING), row


def as_command(benchmark: Path, target: Path) -> str:
    command: list[str | Path] = [sys.executable, benchmark, "--quick", "--json", target]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def in_process(benchmark: Path, parts: tuple[str, ...], target: Path) -> str:
    main = importlib.import_module(benchmark.stem).main
    processes.preload()  # the benchmarks have a list of their own
    with at_most(SECONDS):
        chosen = [word for part in parts for word in ("--part", part)]
        return CliRunner().invoke(main, ["--quick", "--json", str(target), *chosen], catch_exceptions=False).stdout


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block when it takes longer, whatever it waits for."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
