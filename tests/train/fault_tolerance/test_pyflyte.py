"""The same through ``pyflyte run``: the workers are started again by their agent, the run by its user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.command_line import PYFLYTE
from tests.support.fault_schedule import newest
from tests.support.processes import forked_workers
from tests.support.quick_config import EXPORT, NETWORK

CONFIG = {
    "model": {"arguments": {"hidden": [48, 32], "dropout": 0.2}},
    "training": {"epochs": 240, "batch_size": 64, "checkpoint_every": 10, "evaluate_every": 100, "patience": 0},
    "export": EXPORT,
    "collectives": NETWORK,
}
#: One process group of two; started again twice by its agent.
PROFILE = "[stages.train]\nprocesses = 2\nrestarts = 2\n[stages.collectives]\nprocesses = 2\n"
ROWS = "".join(f"{i % 7},{(i * 37) % 101},{'yes' if i % 3 else 'no'}\n" for i in range(400))


class Runs:
    """The main job in a directory of its own, started as often as needed."""

    def __init__(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        (place / "t.csv").write_text("a,b,y\n" + ROWS)
        (place / "run.yaml").write_text(json.dumps(CONFIG))
        (place / "profile.toml").write_text(PROFILE)

    def start(self) -> subprocess.Popen[bytes]:
        workflow: list[str | Path] = [PYFLYTE, "run", REPOSITORY / "workflows/training.py", "train_and_export"]
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen(
                [*workflow, "--data", "t.csv", "--target", "y", "--config", "run.yaml"],
                cwd=self.place,
                env={**os.environ, "COLUMNS": "600", "SLIPSTREAM_PROFILE": str(self.place / "profile.toml")},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def published(self) -> int:
        with contextlib.suppress(IndexError, ValueError):
            (home,) = self.place.glob(".slipstream/checkpoints/*")
            return int(newest(home).name[5:17])
        return 0

    def wait_for_step(self, agent: subprocess.Popen[bytes], step: int) -> None:
        end = time.monotonic() + 120
        while self.published() < step:
            assert agent.poll() is None and time.monotonic() < end, f"step {step} was not reached: {self.log()}"
            time.sleep(0.01)

    def trained(self) -> dict[str, str]:
        (manifest,) = self.place.glob(".slipstream/train/*/manifest.json")
        files = json.loads(manifest.read_bytes())["files"]
        return {name: files[name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")}

    def log(self) -> str:
        return (self.place / "log").read_text()[-6000:]


@pytest.mark.prove
def test_killed_under_pyflyte_it_ends_the_same(tmp_path: Path) -> None:
    whole, killed = Runs(tmp_path / "whole"), Runs(tmp_path / "killed")
    assert whole.start().wait(300) == 0, whole.log()

    agent = killed.start()
    # In one execution: the agent starts the workers again, and they go on from its own checkpoint.
    for step, victims in ((50, slice(0, 1)), (200, slice(None))):
        killed.wait_for_step(agent, step)
        workers = forked_workers(agent.pid)
        assert len(workers) == 2
        for worker in workers[victims]:
            os.kill(worker, signal.SIGKILL)
    # A third loss is one too many: the run ends, and says how to go on.
    killed.wait_for_step(agent, 350)
    os.kill(forked_workers(agent.pid)[1], signal.SIGKILL)
    assert agent.wait(120) == 1
    said = "train: interrupted (the worker of rank 1 was lost to SIGKILL); start it again to resume from there"
    assert said in killed.log()
    # The agent itself: killed, then told to end.
    agent = killed.start()
    killed.wait_for_step(agent, 500)
    agent.kill()
    assert agent.wait() == -signal.SIGKILL
    agent = killed.start()
    killed.wait_for_step(agent, 650)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 1
    assert re.search(r"interrupted \(left at step \d+, saved \(rank \d: signal: SIGTERM\)\)", killed.log())

    assert killed.start().wait(300) == 0, killed.log()
    assert killed.trained() == whole.trained()
    (attempt,) = killed.place.glob(".slipstream/train/*/attempt.json")
    ledger = json.loads(attempt.read_bytes())["ledger"]
    assert ledger["attempts"] == 6, ledger
    assert (killed.place / "log").read_text().count("resumes from step") == 5
