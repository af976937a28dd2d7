"""One check in this process: ``python -m tests.support.gpu_proof.one CHECK DIRECTORY KEPT RESULT [--quick]``, where
CHECK is its JSON."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

from slipstream.one_line import one_line
from tests.support.gpu_proof.check import Check, NotHere, Place, Result


def place_for(directory: Path, kept: Path, quick: bool) -> Place:
    """The GPUs that torch sees; in the form of seconds two processes on the CPU."""
    if quick or not torch.cuda.is_available():
        return Place(torch.device("cpu"), 2, directory, kept, small=True)
    return Place(torch.device("cuda", 0), torch.cuda.device_count(), directory, kept, small=False)


def run(check: Check, place: Place) -> Result:
    """Whatever the check does, there is a result, with the last line of what it raised."""
    result, started = Result(check.name, check.claim, "held"), time.perf_counter()
    try:
        result = replace(result, figures=tuple(check.load()(place)))
    except NotHere as lacks:
        result = replace(result, state="not run", reason=str(lacks))
    except Exception as error:
        traceback.print_exc()
        result = replace(result, state="failed", reason=one_line(f"{type(error).__name__}: {error}"))
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def main(check: Check, directory: Path, kept: Path, target: Path, *, quick: bool) -> None:
    target.write_text(json.dumps(asdict(run(check, place_for(directory, kept, quick)))))


if __name__ == "__main__":
    work, leave, answer = map(Path, sys.argv[2:5])
    main(Check(**json.loads(sys.argv[1])), work, leave, answer, quick="--quick" in sys.argv[5:])
