"""Run one check in this process.

``python -m slipstream.operations.proofs.gpu.run_check CHECK DIRECTORY KEPT RESULT [--quick]``, where CHECK is its JSON.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckResult, GpuCheck
from slipstream.shared.one_line import one_line


def context_for(directory: Path, kept: Path, quick: bool) -> CheckContext:
    """Return a context of the GPUs that torch sees, or of two processes on the CPU."""
    if quick or not torch.cuda.is_available():
        return CheckContext(torch.device("cpu"), 2, directory, kept, small=True)
    return CheckContext(torch.device("cuda", 0), torch.cuda.device_count(), directory, kept, small=False)


def run_check(check: GpuCheck, context: CheckContext) -> CheckResult:
    """Run a check and return its result, with the last line of an error that it raised."""
    result, started = CheckResult(check.name, check.claim, "held"), time.perf_counter()
    try:
        result = replace(result, figures=tuple(check.load()(context)))
    except CannotRun as lacks:
        result = replace(result, state="not run", reason=str(lacks))
    except Exception as error:
        traceback.print_exc()
        result = replace(result, state="failed", reason=one_line(f"{type(error).__name__}: {error}"))
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def main(check: GpuCheck, directory: Path, kept: Path, target: Path, *, quick: bool) -> None:
    result = run_check(check, context_for(directory, kept, quick))
    target.write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    work, leave, answer = map(Path, sys.argv[2:5])
    main(GpuCheck(**json.loads(sys.argv[1])), work, leave, answer, quick="--quick" in sys.argv[5:])
