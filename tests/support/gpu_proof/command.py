"""``slipstream gpu-proof``: every check in a process of its own, one after the other, whatever fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch

from slipstream.errors import UserError
from slipstream.machine.torch_versions import check_torch
from slipstream.one_line import one_line
from tests.support import REPOSITORY
from tests.support.gpu_proof.check import CHECKS, Check, Figure, Result
from tests.support.gpu_proof.page import fill, page

JSON, PAGE = "gpu.json", "gpu.html"
#: Seconds under which a check is not begun.
TOO_LITTLE = 10.0
NAMES = [check.name for check in CHECKS]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/gpu"), show_default=True)
@click.option("--only", "names", multiple=True, type=click.Choice(NAMES), help="Some checks.")
@click.option("--minutes", default=10.0, show_default=True, help="The longest that all may take.")
@click.option("--readme", type=click.Path(path_type=Path, exists=True), help="Fill in its table in the end.")
@click.option("--quick", is_flag=True, help="Rehearse on the CPU, with small sizes.")
def main(output: Path, names: tuple[str, ...], minutes: float, readme: Path | None, *, quick: bool) -> None:
    """Run the checks that need a GPU on this machine's GPUs, and measure.

    Writes gpu.json, gpu.html and every check's output to OUTPUT, and updates them after every check.

    Example: slipstream gpu-proof --only speed --only saves
    """
    check_torch()
    if not quick and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; expected one and a torch built for it, or --quick for a rehearsal")
    output.mkdir(parents=True, exist_ok=True)
    device = "the CPU, a rehearsal" if quick else device_name()
    started, results = time.monotonic(), list[Result]()
    wanted = [check for check in CHECKS if not names or check.name in names]
    if torch.cuda.device_count() > 1 and not quick:  # as many processes have to start
        wanted = [replace(check, limit_s=2 * check.limit_s) for check in wanted]
    click.echo(f"{device}: {len(wanted)} checks, at most {minutes:g} minutes")
    for check in wanted:
        left = 60 * minutes - (time.monotonic() - started)
        results.append(in_process(check, output, min(check.limit_s, left), quick=quick))
        click.echo(line(results[-1]))
        write(output, device, results, time.monotonic() - started, quick)
    if readme and not quick and not names:
        readme.write_text(fill(readme.read_text(), device, results))
    failed = [result.name for result in results if result.state == "failed"]
    click.echo(f"{output / PAGE}, {output / JSON}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; what they said is in {output}")


def device_name() -> str:
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count > 1 else torch.cuda.get_device_name(0)


def in_process(check: Check, output: Path, limit_s: float, *, quick: bool) -> Result:
    """Run the check in a session of its own, which is killed after ``limit_s``."""
    if limit_s < TOO_LITTLE:
        return Result(check.name, check.claim, "not run", "the time is over")
    log = output / f"{check.name.replace(' ', '-')}.log"
    environment = {**os.environ, "PYTHONPATH": path_with(REPOSITORY, REPOSITORY / "benchmarks")}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch, log.open("w") as said:
        target, directory = Path(scratch) / "result.json", Path(scratch) / "work"
        directory.mkdir()
        command: list[str | Path] = [sys.executable, "-m", "tests.support.gpu_proof.one", json.dumps(asdict(check))]
        command += [directory, output.resolve(), target, *(["--quick"] if quick else [])]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        cut = False
        try:
            why = f"ended with {describe(process.wait(limit_s))}"
        except subprocess.TimeoutExpired:
            why, cut = f"not finished after {limit_s:.0f} s", limit_s < check.limit_s
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if target.exists():
            return from_json(json.loads(target.read_text()))
    result = Result(check.name, check.claim, "failed", f"{why}: {last_line(log)}")
    if cut:
        result = replace(result, state="not run", reason=f"the time was over after {limit_s:.0f} s")
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def path_with(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"


def from_json(found: dict[str, Any]) -> Result:
    return Result(**{**found, "figures": tuple(Figure(*figure) for figure in found["figures"])})


def line(result: Result) -> str:
    text = result.reason or ", ".join(map(str, result.figures))
    return f"{result.state:<8} {result.name:<16} {result.seconds:5.1f} s  {text}"


def write(output: Path, device: str, results: Sequence[Result], seconds: float, quick: bool) -> None:
    """Both files, each replaced as a whole."""
    record = {"device": device, "quick": quick, "seconds": round(seconds, 1), "checks": named(results)}
    for name, text in {JSON: json.dumps(record, indent=1), PAGE: page(device, results, seconds, quick)}.items():
        partial = output / f"{name}.partial"
        partial.write_text(text + "\n")
        partial.replace(output / name)


def named(results: Iterable[Result]) -> list[dict[str, Any]]:
    """With figures by their fields' names."""
    return [{**asdict(each), "figures": [figure._asdict() for figure in each.figures]} for each in results]
