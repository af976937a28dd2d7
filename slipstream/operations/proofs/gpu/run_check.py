"""Run one check in this process.

``python -m slipstream.operations.proofs.gpu.run_check CHECK DIRECTORY KEPT RESULT [--quick]``, where CHECK is its JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

from slipstream.operations.proofs.gpu.check import (
    FIGURES,
    CannotRun,
    CheckContext,
    CheckFigure,
    CheckResult,
    GpuCheck,
    Limit,
)
from slipstream.shared.one_line import one_line


def context_for(directory: Path, kept: Path, quick: bool) -> CheckContext:
    """Return a context of the GPUs that torch sees, or of two processes on the CPU."""
    if quick or not torch.cuda.is_available():
        return CheckContext(torch.device("cpu"), 2, directory, kept, small=True)
    return CheckContext(torch.device("cuda", 0), torch.cuda.device_count(), directory, kept, small=False)


def run_check(check: GpuCheck, context: CheckContext) -> CheckResult:
    """Run a check and return its result, with the last line of an error that it raised.

    Every figure is on disk when the next one is measured.
    """
    result, started = CheckResult(check.name, check.claim, "held"), time.perf_counter()
    figures = list[CheckFigure]()
    try:
        for figure in check.load()(context):
            figures.append(figure)
            write_figure(context.kept / FIGURES, check.name, figure)
        if breach := check.describe_breach(figures, rehearsed=context.device.type == "cpu"):
            result = replace(result, state="failed", reason=breach)
    except CannotRun as lacks:
        result = replace(result, state="not run", reason=str(lacks))
    except Exception as error:
        traceback.print_exc()
        result = replace(result, state="failed", reason=one_line(f"{type(error).__name__}: {error}"))
    return replace(result, figures=tuple(figures), seconds=round(time.perf_counter() - started, 1))


def write_figure(path: Path, check: str, figure: CheckFigure) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"check": check, **figure._asdict()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main(check: GpuCheck, directory: Path, kept: Path, target: Path, *, quick: bool) -> None:
    result = run_check(check, context_for(directory, kept, quick))
    target.write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    work, leave, answer = map(Path, sys.argv[2:5])
    given = json.loads(sys.argv[1])
    main(
        GpuCheck(**{**given, "limits": tuple(Limit(*each) for each in given["limits"])}),
        work,
        leave,
        answer,
        quick="--quick" in sys.argv[5:],
    )
