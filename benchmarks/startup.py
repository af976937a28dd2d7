"""Start-up costs: imports of the workflows, pods, and the main job with and without reuse.

    python benchmarks/startup.py [OPTIONS]

*imports*: fresh interpreters import ``workflows.training``, with or without the cached digests of its sources, or only
flytekit, its PyTorch plugin and torch. They take turns. Reported are CPU seconds, and the median of the paired ratios
with its distribution-free 95 % interval. *pods*: the same for ``pyflyte-execute`` with an empty task, in a module with
the imports of a stage's pod, compared with an empty task without imports; torch elastic's tasks are compared with a
task that imports plugin and torch. *job*: ``make run`` in a fresh directory, and again with every stage reused; wall
seconds, and CPU seconds of all child processes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from harness.command import benchmark, part_option
from harness.empty_task import IMPORTS
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, interval_of_median, settled

ROOT = Path(__file__).parents[1]
PARTS = "flytekit, plugin, torch"
WORKFLOWS = "workflows.training"
COLD = f"{WORKFLOWS}, no cached digests"
STATEMENTS = {
    PARTS: "import flytekit, flytekitplugins.kfpytorch, torch",
    WORKFLOWS: f"import {WORKFLOWS}",
    COLD: "import os, tempfile; fresh = tempfile.TemporaryDirectory(); os.environ['XDG_CACHE_HOME'] = fresh.name; "
    f"import {WORKFLOWS}",
}
EMPTY, EMPTY_TORCH = "empty task", "empty task, with plugin and torch"
PLAIN = ("inputs", "prepare", "export", "report", "promote", "compress")
WITH_TORCH = ("train", "collectives")
PODS = {
    EMPTY: "",
    **{room: f"tasks.{room}" for room in PLAIN},
    EMPTY_TORCH: "flytekitplugins.kfpytorch torch",
    **{room: f"tasks.{room}" for room in WITH_TORCH},
}
QUICK = (EMPTY, "prepare")
RESOLVER = "flytekit.core.python_auto_container.default_task_resolver"
COLUMNS = (Column("wall s", "wall"), Column("CPU s", "cpu"))
RATIO = (Column("ratio", "ratio", "{:.3f}"), Column("95 % from", "low", "{:.3f}"), Column("to", "high", "{:.3f}"))
#: The command of ``make run``.
JOB = ("run", str(ROOT / "workflows/training.py"), "train_and_export")


@benchmark
@part_option(("imports", "pods", "job"))
def main(quick: bool, parts: Sequence[str]) -> Iterator[Table]:
    """Measure imports in turns, pods, and the main job twice; quick: one turn of the imports and of two pods."""
    if "imports" in parts:
        yield imports(turns=1 if quick else 15)
    if "pods" in parts:
        yield pods({name: PODS[name] for name in QUICK} if quick else PODS, turns=1 if quick else 9)
    if "job" in parts and not quick:
        yield main_job()


def imports(turns: int) -> Table:
    contenders = {name: partial(cost, (sys.executable, "-c", code), ROOT) for name, code in STATEMENTS.items()}
    runs = in_turns(contenders, turns)
    rows = {name: settled(found) for name, found in runs.items()}
    for name in (WORKFLOWS, COLD):
        ratios = [ours["cpu"] / theirs["cpu"] for ours, theirs in zip(runs[name], runs[PARTS], strict=True)]
        ratio, low, high = interval_of_median(ratios)
        rows[name] |= {"ratio": ratio, "low": low, "high": high}
    return Table(f"import, {turns} turns", (*COLUMNS, *RATIO), rows)


def pods(tasks: Mapping[str, str], turns: int) -> Table:
    """Measure CPU seconds of pods without the work of their stages, in turns."""
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        write_no_inputs(Path(directory, "inputs.pb"))
        contenders = {name: partial(cost, empty_pod(code, directory), ROOT) for name, code in tasks.items()}
        runs = in_turns(contenders, turns)
    rows = {name: settled(found) for name, found in runs.items()}
    for name, found in runs.items():
        base = runs[EMPTY_TORCH if name in WITH_TORCH else EMPTY]
        ratio, low, high = interval_of_median(
            [one["cpu"] / other["cpu"] for one, other in zip(found, base, strict=True)]
        )
        rows[name] |= {"ratio": ratio, "low": low, "high": high}
    return Table(f"pods without their engines, {turns} turns", (*COLUMNS, *RATIO), rows)


def write_no_inputs(path: Path) -> None:
    from flyteidl.core.literals_pb2 import LiteralMap

    path.write_bytes(LiteralMap().SerializeToString())


def empty_pod(imports: str, directory: str) -> tuple[str, ...]:
    """Return the command of a pod with an empty task in a module that has these ``imports``."""
    environment = ("env", f"PYTHONPATH={ROOT}", f"{IMPORTS}={imports}")
    prefixes = ("--inputs", "--output-prefix", "--raw-output-data-prefix")
    places = (f"{directory}/inputs.pb", f"{directory}/out", f"{directory}/raw")
    given = [each for pair in zip(prefixes, places, strict=True) for each in pair]
    task = ("task-module", "benchmarks.harness.empty_task", "task-name", "empty")
    return (*environment, beside("pyflyte-execute"), *given, "--resolver", RESOLVER, "--", *task)


def main_job() -> Table:
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        runs = ("first", "again: every stage is reused")
        return Table("make run", COLUMNS, {name: cost([beside("pyflyte"), *JOB], Path(directory)) for name in runs})


def beside(command: str) -> str:
    """Return the path of a command of this interpreter's environment."""
    return str(Path(sys.executable).with_name(command))


def cost(command: Sequence[str], directory: Path) -> Figures:
    before, started = spent(), time.perf_counter()
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return {"wall": time.perf_counter() - started, "cpu": spent() - before}


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
