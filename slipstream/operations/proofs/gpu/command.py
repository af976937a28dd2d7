"""``slipstream gpu-proof``: run every check in a process, one after the other, even if some fail."""

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

from slipstream.operations.proofs.gpu.check import CHECKS, FIGURES, CheckFigure, CheckResult, GpuCheck
from slipstream.operations.proofs.gpu.page import fill, page
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from slipstream.shared.machine.torch_versions import check_torch
from slipstream.shared.one_line import one_line

JSON, PAGE, LOG = "gpu.json", "gpu.html", "log.txt"
#: Least seconds for which a check is started.
TOO_LITTLE = 10.0
NAMES = [check.name for check in CHECKS]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/gpu"), show_default=True)
@click.option("--only", "names", multiple=True, type=click.Choice(NAMES), help="Some checks.")
@click.option("--minutes", default=8.8, show_default=True, help="The longest that all may take.")
@click.option("--readme", type=click.Path(path_type=Path, exists=True), help="Fill in its table in the end.")
@click.option("--quick", is_flag=True, help="Rehearse on the CPU, with small sizes.")
def main(output: Path, names: tuple[str, ...], minutes: float, readme: Path | None, *, quick: bool) -> None:
    """Run the checks that need a GPU on this machine's GPUs, and measure.

    Writes figures.jsonl, to which every figure is added when it is measured, log.txt, gpu.json and gpu.html to OUTPUT.

    Example: slipstream gpu-proof --only speed --only saves
    """
    check_torch()
    if not quick and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; expected one and a torch built for it, or --quick for a rehearsal")
    output.mkdir(parents=True, exist_ok=True)
    for name in (FIGURES, LOG):
        (output / name).unlink(missing_ok=True)
    device = "the CPU, a rehearsal" if quick else device_name()
    started, results = time.monotonic(), list[CheckResult]()
    wanted = [check for check in CHECKS if not names or check.name in names]
    if torch.cuda.device_count() > 1 and not quick:  # as many processes have to start
        wanted = [replace(check, limit_s=2 * check.limit_s) for check in wanted]
    click.echo(f"{device}: {len(wanted)} checks, at most {minutes:g} minutes")
    for check in wanted:
        left = 60 * minutes - (time.monotonic() - started)
        results.append(in_process(check, output, min(check.limit_s, left), quick=quick))
        click.echo(line(results[-1]))
        write_results(output, device, results, time.monotonic() - started, quick)
    if readme and not quick and not names:
        text = fill(readme.read_text(encoding="utf-8"), device, results)
        readme.write_text(text, encoding="utf-8")
    failed = [result.name for result in results if result.state == "failed"]
    click.echo(f"{output / PAGE}, {output / JSON}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; what they said is in {output}")


def device_name() -> str:
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count > 1 else torch.cuda.get_device_name(0)


def in_process(check: GpuCheck, output: Path, limit_s: float, *, quick: bool) -> CheckResult:
    """Run the check in a new session, which is killed after ``limit_s``; figures measured by then are kept."""
    if limit_s < TOO_LITTLE:
        return CheckResult(check.name, check.claim, "not run", "the time is over")
    log = output / LOG
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch, log.open("a", encoding="utf-8") as said:
        said.write(f"\n##### {check.name}\n")
        said.flush()
        target, directory = Path(scratch) / "result.json", Path(scratch) / "work"
        directory.mkdir()
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "slipstream.operations.proofs.gpu.run_check",
            json.dumps(asdict(check)),
        ]
        command += [directory, output.resolve(), target, *(["--quick"] if quick else [])]
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
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
            return from_json(json.loads(target.read_text(encoding="utf-8")))
    figures = measured_figures(output / FIGURES, check.name)
    result = CheckResult(check.name, check.claim, "failed", f"{why}: {last_line(log)}", figures=figures)
    if cut:
        result = replace(result, state="not run", reason=f"the time was over after {limit_s:.0f} s")
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def measured_figures(path: Path, check: str) -> tuple[CheckFigure, ...]:
    """Return the figures of a check that was killed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return tuple(CheckFigure(one["name"], one["value"], one["unit"]) for one in found if one["check"] == check)


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "it said nothing" if lines[-1].startswith("#####") else one_line(lines[-1])


def from_json(found: dict[str, Any]) -> CheckResult:
    return CheckResult(**{**found, "figures": tuple(CheckFigure(*figure) for figure in found["figures"])})


def line(result: CheckResult) -> str:
    text = "; ".join(filter(None, [result.reason, ", ".join(map(str, result.figures))]))
    return f"{result.state:<8} {result.name:<16} {result.seconds:5.1f} s  {text}"


def write_results(output: Path, device: str, results: Sequence[CheckResult], seconds: float, quick: bool) -> None:
    """Replace both files atomically."""
    record = {"device": device, "quick": quick, "seconds": round(seconds, 1), "checks": named(results)}
    for name, text in {JSON: json.dumps(record, indent=1), PAGE: page(device, results, seconds, quick)}.items():
        partial = output / f"{name}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(output / name)


def named(results: Iterable[CheckResult]) -> list[dict[str, Any]]:
    """Return the results as JSON, with figures by the names of their fields."""
    return [{**asdict(each), "figures": [figure._asdict() for figure in each.figures]} for each in results]
