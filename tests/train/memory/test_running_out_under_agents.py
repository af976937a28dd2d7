"""Out of memory under torch's agent and in Flyte's task: all ranks restart and continue."""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

from slipstream.shared.settings import to_dict
from tests.support.little_memory import LARGE, ROWS, STEPS_PER_EPOCH, newest_step, take_memory_away
from tests.support.main_job import MainJob
from tests.support.processes import forked_workers, torchrun, workers_of
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.training import table_of_numbers

CONFIG: dict[str, Any] = {
    "model": to_dict(LARGE),
    "training": {"epochs": 3, "batch_size": ROWS, "checkpoint_every": 1, "patience": 0},
    "export": EXPORT,
    "collectives": NETWORK,
}
WITH_TWO = {**CONFIG, "training": {**CONFIG["training"], "accumulation": 2}}
PROFILE = "[stages.train]\nprocesses = 2\n[stages.collectives]\nprocesses = 2\n"
RAN_OUT = re.compile(r"rank \d ran out of memory at 1 micro-batch: goes on with 2 from the last checkpoint")
PATIENCE_S = 240.0


def run_out(agent: Popen[bytes], workers: Callable[[], list[int]], home: Callable[[], Path], kept: Path) -> None:
    """Take memory away from one of the workers once there is a checkpoint, and keep all checkpoints that there are
    until the agent has ended."""
    end = time.monotonic() + PATIENCE_S
    fired = False
    while agent.poll() is None:
        assert time.monotonic() < end, "the run did not end"
        with contextlib.suppress(OSError, ValueError):
            keep(home(), kept)
            if not fired and newest_step(home()) >= 1:
                take_memory_away(workers()[-1], lambda: True)
                fired = True
        time.sleep(0.01)
    assert fired


def keep(home: Path, kept: Path) -> None:
    """Checkpoints are not changed once they are complete, but deleted."""
    for manifest in home.glob("step-*/manifest.json"):
        name = manifest.parent.name
        if not (kept / name).exists():
            part = kept / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(manifest.parent, part, copy_function=os.link)
            part.rename(kept / name)


def resumed_checkpoint(log: str, kept: Path) -> Path:
    """That from which the last attempt resumed."""
    (step,) = re.findall(r"resumes from step (\d+) ", log)
    return next(kept.glob(f"step-{int(step):012d}.*"))


def digests(model: Path) -> dict[str, str]:
    files = json.loads((model / "manifest.json").read_bytes())["files"]
    return {name: files[name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")}


def ends(model: Path) -> list[str]:
    return json.loads((model / "attempt.json").read_bytes())["ledger"]["ends"]


@pytest.mark.prove
@pytest.mark.parametrize("shard", ["none", "weights"])
def test_torchrun_restarts_all_ranks(shard: str, tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "table", STEPS_PER_EPOCH * ROWS)
    config, with_two = (
        {"model": to_dict(LARGE), "training": {**each["training"], "parallel": {"shard": shard}}}
        for each in (CONFIG, WITH_TWO)
    )
    one, other = tmp_path / "one/model", tmp_path / "other/model"
    agent = torchrun(data, one, config, restarts=1)
    home = Path(f"{one}.checkpoints")
    run_out(agent, lambda: workers_of(agent.pid), lambda: home, tmp_path / "kept")
    log = (one.parent / "log").read_text()
    assert agent.returncode == 0, log[-3000:]
    assert RAN_OUT.search(log) and RAN_OUT.fullmatch(ends(one)[0]) and ends(one)[1:] == ["finished"]
    found = resumed_checkpoint(log, tmp_path / "kept")
    shutil.copytree(found, Path(f"{other}.checkpoints") / found.name)
    assert torchrun(data, other, with_two, restarts=0).wait(PATIENCE_S) == 0, (other.parent / "log").read_text()[-3000:]
    assert digests(one) == digests(other)


def table() -> str:
    """Return a table whose training split has ``STEPS_PER_EPOCH`` batches."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(int(STEPS_PER_EPOCH * ROWS / 0.79), 3))
    return "a,b,c,y\n" + "".join(f"{a:.4f},{b:.4f},{c:.4f},{'yes' if a + b > c else 'no'}\n" for a, b, c in rows)


@pytest.mark.prove
def test_flytes_task_starts_another_group(tmp_path: Path) -> None:
    one, other = (
        MainJob(tmp_path / "one", table(), CONFIG, PROFILE),
        MainJob(tmp_path / "other", table(), WITH_TWO, PROFILE),
    )

    def home() -> Path:
        return next(one.place.glob(".slipstream/checkpoints/*"), one.place / "none")

    agent = one.start()
    run_out(agent, lambda: forked_workers(agent.pid), home, tmp_path / "kept")
    log = (one.place / "log").read_text()
    assert agent.returncode == 0 and RAN_OUT.search(log), log[-3000:]
    found = resumed_checkpoint(log, tmp_path / "kept")
    shutil.copytree(found, other.place / home().relative_to(one.place) / found.name)
    assert other.start().wait(PATIENCE_S) == 0, other.log()
    assert f"resumes from step {int(found.name[5:17])} " in other.log()
    assert one.trained() == other.trained()
    (model,) = one.place.glob(".slipstream/train/*")
    assert RAN_OUT.fullmatch(ends(model)[0]) and ends(model)[1:] == ["finished"]
    (report,) = one.place.glob("runs/*/report.html")
    assert RAN_OUT.search(report.read_text())
