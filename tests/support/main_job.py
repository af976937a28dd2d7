"""The main job by ``pyflyte run``, and the progress of its training."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY
from tests.support.command_line import PYFLYTE
from tests.support.fault_schedule import newest


class MainJob:
    """The main job in a directory of its own, started as often as needed."""

    def __init__(self, place: Path, table: str, config: Mapping[str, Any], profile: str) -> None:
        """``table`` is CSV whose target is ``y``."""
        place.mkdir(exist_ok=True)
        self.place = place
        (place / "t.csv").write_text(table)
        (place / "run.yaml").write_text(json.dumps(config))
        (place / "profile.toml").write_text(profile)

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
