"""TraceML's diagnosis of a training with a known fault.

TraceML is launched as its documentation says: by ``traceml run --nproc-per-node`` on one machine, and for a limited
link by one ``traceml run --nnodes`` per rank.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness.links import REPOSITORY, SEARCH_PATH, address, linked
from harness.provoked import WORLD, Provocation, free_port, written_settings

LOOP = Path(__file__).with_name("traced_loop.py")
NAME, TIMEOUT_S = "run", 120


@dataclass(frozen=True)
class Diagnosis:
    """TraceML's primary diagnosis, and the seconds of a step (0 if unknown)."""

    status: str
    summary: str
    step_s: float


class Failed(Exception):
    """TraceML failed or gave no diagnosis; the message is its output."""


def installed() -> bool:
    return find_spec("traceml_ai") is not None


def diagnosed(provocation: Provocation, tables: Path, place: Path, steps: int) -> Diagnosis:
    """Run TraceML on a training with a fault and return its diagnosis.

    Raises ``NotAllowed`` where the fault cannot be provoked, and ``Failed`` if there is no diagnosis.
    """
    settings = written_settings(provocation, tables, place, steps)
    its = ["--run-name", NAME, "--logs-dir", str(place), "--args", str(settings)]
    traceml = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", str(LOOP)]
    if provocation.mbit:
        nodes = ["--nnodes", str(WORLD), "--master-addr", address(0), "--aggregator-bind-host", "0.0.0.0"]
        command = f'exec {shlex.join(traceml)} --node-rank "$RANK" {shlex.join([*nodes, *its])}'
        with linked(WORLD, provocation.mbit) as links:
            ended = links.command(["sh", "-c", command], REPOSITORY)
    else:
        ports = ["--master-port", str(free_port()), "--aggregator-port", str(free_port())]
        here = ["--nproc-per-node", str(WORLD), *ports]
        ended = [alone([*traceml, *here, *its])]
    summary = place / NAME / "final_summary.json"
    if any(code for code, _ in ended) or not summary.exists():
        raise Failed("\n".join(output for _, output in ended).strip() or f"no end after {TIMEOUT_S} s")
    found = json.loads(summary.read_text())["primary_diagnosis"]
    step_ms = (found.get("evidence") or {}).get("step_time_ms")
    return Diagnosis(found["status"], found["summary"], step_ms / 1e3 if step_ms else 0.0)


def alone(words: list[str]) -> tuple[int, str]:
    """Run a command and return exit code and output; after a timeout it and its children are killed."""
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": SEARCH_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=TIMEOUT_S)[0]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(), ""
