"""What starting costs: importing the workflows beside what they are made of, and the main job when it was run before.

    python benchmarks/startup.py [--quick] [--json FILE] [--part imports|job]

*imports*: fresh interpreters import ``workflows.training``, or only flytekit, its PyTorch plugin and torch, in turns;
CPU seconds, and the median of the paired ratios with its distribution-free 95 % interval. *job*: ``make run`` in a
fresh directory, and once more where every stage is reused; seconds of the clock, and of CPU with all child processes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from harness.command import benchmark, part_option
from harness.table import Column, Table
from harness.turns import Figures, in_turns, interval_of_median, settled

ROOT = Path(__file__).parents[1]
PARTS = "flytekit, plugin, torch"
WORKFLOWS = "workflows.training"
STATEMENTS = {PARTS: "import flytekit, flytekitplugins.kfpytorch, torch", WORKFLOWS: f"import {WORKFLOWS}"}
COLUMNS = (Column("wall s", "wall"), Column("CPU s", "cpu"))
RATIO = (Column("ratio", "ratio", "{:.3f}"), Column("95 % from", "low", "{:.3f}"), Column("to", "high", "{:.3f}"))
#: The command that ``make run`` gives.
JOB = ("run", str(ROOT / "workflows/training.py"), "train_and_export")


@benchmark
@part_option(("imports", "job"))
def main(quick: bool, parts: Sequence[str]) -> Iterator[Table]:
    """Imports in turns, and the main job twice; quick: one turn of the imports only."""
    if "imports" in parts:
        yield imports(turns=1 if quick else 15)
    if "job" in parts and not quick:
        yield main_job()


def imports(turns: int) -> Table:
    contenders = {name: partial(cost, (sys.executable, "-c", code), ROOT) for name, code in STATEMENTS.items()}
    runs = in_turns(contenders, turns)
    ratios = [ours["cpu"] / theirs["cpu"] for ours, theirs in zip(runs[WORKFLOWS], runs[PARTS], strict=True)]
    ratio, low, high = interval_of_median(ratios)
    rows = {name: settled(found) for name, found in runs.items()}
    rows[WORKFLOWS] |= {"ratio": ratio, "low": low, "high": high}
    columns = (
        *COLUMNS,
        Column("ratio", "ratio", "{:.3f}"),
        Column("95 % from", "low", "{:.3f}"),
        Column("to", "high", "{:.3f}"),
    )
    return Table(f"import, {turns} turns", columns, rows)


def main_job() -> Table:
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        runs = ("first", "again: every stage is reused")
        return Table("make run", COLUMNS, {name: cost([pyflyte(), *JOB], Path(directory)) for name in runs})


def pyflyte() -> str:
    return str(Path(sys.executable).with_name("pyflyte"))


def cost(command: Sequence[str], directory: Path) -> Figures:
    """Wall-clock seconds of a command, and CPU seconds of all its processes."""
    before, started = spent(), time.perf_counter()
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return {"wall": time.perf_counter() - started, "cpu": spent() - before}


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
