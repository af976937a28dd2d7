"""Runs the main job in a directory whose disk something else fills when a file is opened for writing: at another kind
of file in each run, until a run ends well.

A script, run by ``tests/command_line/test_full_disk.py``, which prints a line of JSON for each run.
"""

import json
import os
import sys
from pathlib import Path

from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.format import Artifact
from tests.support.command_line import start_in
from tests.support.quick_config import EXPORT, NETWORK

CONFIG = {"training": {"epochs": 2}, "export": EXPORT, "collectives": NETWORK, "promotion": {"max_loss": 50}}
HOOK = Path(__file__).with_name("full_at_open")
#: By stage, suffixes of files whose bytes depend only on the inputs.
EXACT = {"prepare": (".rows", ".json"), "train": (".safetensors", "history.json")}
#: More kinds of files than there are.
MOST = 300


def run(disk: Path, filled_for: Path | None = None) -> bool:
    """Whether the disk was filled."""
    environment = {}
    if filled_for:
        path = f"{HOOK}{os.pathsep}{os.environ['PYTHONPATH']}"
        environment = {"PYTHONPATH": path, "SMALL_DISK": str(disk), "FILLED_FOR": str(filled_for)}
    ended = start_in(
        disk, "--registry", "registry", "--config", json.dumps(CONFIG), workflow="train_and_promote", **environment
    )
    filled = (disk / "filler").exists()
    (disk / "filler").unlink(missing_ok=True)
    store = disk / ".slipstream"
    made = {
        f"{stage}/{name}": record.sha256
        for path in store.glob("*/*/manifest.json")
        if (stage := path.parent.parent.name) in EXACT
        for name, record in Artifact.open(path.parent, stage).check().files.items()
        if name.endswith(EXACT[stage])
    }
    result = {
        "at": filled_for.read_text().splitlines()[-1] if filled and filled_for else "",
        "code": ended.returncode,
        "lines": [line.strip("│ ") for line in ended.stdout.splitlines() if "no space left" in line and "│" in line],
        "traceback": "Traceback" in ended.stdout,
        "output": ended.stdout[-2000:],
        "hidden": [str(path) for path in (*disk.glob("runs/.*"), *store.glob("*/.*"))],
        "whole": made,
        "runs": len(list(disk.glob("runs/*/summary.json"))),
        "promoted": [pointer.number for pointer in Registry(str(disk / "registry")).history()],
    }
    print(json.dumps(result), flush=True)
    return filled


if __name__ == "__main__":
    small, large, filled_for = map(Path, sys.argv[1:])
    for _ in range(MOST):
        if not run(small, filled_for):
            break
    run(large)
