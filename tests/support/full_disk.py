"""Runs the main job in a directory whose disk something else fills when a stage begins to write: a script, run by
``tests/command_line/test_full_disk.py``, which prints a line of JSON for each run."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tasks.flyte.stage
import workflows.training  # noqa: F401 - imported before the forks
from slipstream.artifacts.format import Artifact
from slipstream.artifacts.store import Store
from slipstream.promote.store import Registry
from slipstream.report import run_directory
from tests.support.command_line import run_in
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.small_disk import fill

CONFIG = {"training": {"epochs": 2}, "export": EXPORT, "collectives": NETWORK, "promotion": {"max_loss": 50}}
STAGES = ("prepare", "train", "evaluate", "export", "collectives", "promote", "report")
#: By stage, how the names of the files end of which every byte depends on the inputs alone.
EXACT = {"prepare": (".rows", ".json"), "train": (".safetensors", "history.json")}


def fill_at(stage: str, full: Callable[[], None]) -> None:
    """Have ``full`` called when the stage begins to write. For the rest of this process."""
    workspace, fresh = Store.workspace, tasks.flyte.stage.fresh_directory
    add, new_run = Registry.add, run_directory.new_run

    @contextmanager
    def in_workspace(store: Store, name: str) -> Iterator[Path]:
        with workspace(store, name) as directory:
            if name == stage:
                full()
            yield directory

    def in_fresh(name: str) -> Path:
        directory = fresh(name)
        if name == stage:
            full()
        return directory

    def then(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def after(*arguments: Any) -> Any:
            if name == stage:
                full()
            return work(*arguments)

        return after

    mock.patch.object(Store, "workspace", in_workspace).start()
    mock.patch.object(tasks.flyte.stage, "fresh_directory", in_fresh).start()
    mock.patch.object(Registry, "add", then("promote", add)).start()
    for module in list(sys.modules.values()):
        if getattr(module, "new_run", None) is new_run:
            mock.patch.object(module, "new_run", then("report", new_run)).start()


def job(disk: Path, stage: str, pages: int, said: Any) -> None:
    if stage:
        fill_at(stage, lambda: fill(disk / "filler", pages))
    ended = run_in(disk, "--registry", "registry", "--config", json.dumps(CONFIG), workflow="train_and_promote")
    said.send((ended.returncode, ended.stdout))


def run(disk: Path, stage: str = "", pages: int = 0) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=job, args=(disk, stage, pages, sender))
    process.start()
    sender.close()
    code, text = receiver.recv()
    process.join()
    filled = (disk / "filler").exists()
    (disk / "filler").unlink(missing_ok=True)
    store = disk / ".slipstream"
    made = {
        f"{stage_name}/{name}": record.sha256
        for path in store.glob("*/*/manifest.json")
        if (stage_name := path.parent.parent.name) in EXACT
        for name, record in Artifact.open(path.parent, stage_name).check().files.items()
        if name.endswith(EXACT[stage_name])
    }
    result = {
        "stage": stage,
        "pages": pages,
        "filled": filled,
        "code": code,
        "lines": [line.strip("│ ") for line in text.splitlines() if "no space left" in line],
        "traceback": [line for line in text.splitlines() if line.startswith(("Traceback", "│ Traceback"))],
        "hidden": [str(path) for path in (*disk.glob("runs/.*"), *store.glob("*/.*"))],
        "whole": made,
        "runs": len(list(disk.glob("runs/*/summary.json"))),
        "promoted": [pointer.number for pointer in Registry(str(disk / "registry")).history()],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    small, large, rooms = Path(sys.argv[1]), Path(sys.argv[2]), [int(room) for room in sys.argv[3:]]
    for each in STAGES:
        for room in rooms:
            run(small, each, room)
    run(small)
    run(large)
