"""Trainings with large steps, and removal of their memory from outside the running process."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from slipstream.pipeline.train.checkpoint.home import CHECKPOINTS, complete_checkpoints
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import storage_for

#: What a block of a rank's whole share has: 16,384 numbers for each of 640 rows, 40 MiB. Smaller ones than 32 MiB glibc
#: may keep when they are freed, and a limit on them would bite at any time or never.
ROWS, WIDTH, WORLD = 1280, 16_384, 2
#: How many such blocks a step has at once, at least.
BLOCKS = 4
STEPS_PER_EPOCH = 3
LARGE = ModelConfig("mlp", {"hidden": [WIDTH], "frequencies": 1, "dropout": 0.1})
PATIENCE_S = 60.0


def large_steps(epochs: int, **changed: object) -> TrainingConfig:
    """Settings for prepared data with ``STEPS_PER_EPOCH * ROWS`` rows."""
    settings: dict[str, object] = {"epochs": epochs, "batch_size": ROWS, "checkpoint_every": 1, **changed}
    return TrainingConfig(**settings)  # type: ignore[arg-type]


def data_bytes(pid: int) -> int:
    """What counts against RLIMIT_DATA."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


def take_memory_away(pid: int, after: Callable[[], bool], share: float = 0.7) -> None:
    """Once ``after()`` holds, see what a process takes at least and at most in a step, and leave it this share of the
    difference."""
    seen = list[int]()
    end = time.monotonic() + PATIENCE_S
    while not seen or max(seen) - min(seen) < BLOCKS * 4 * WIDTH * ROWS // WORLD:
        assert psutil.pid_exists(pid) and time.monotonic() < end, "it did not get so far"
        if after():
            seen.append(data_bytes(pid))
        time.sleep(0.002)
    limit = int(min(seen) + share * (max(seen) - min(seen)))
    psutil.Process(pid).rlimit(psutil.RLIMIT_DATA, (limit, limit))


def newest_step(home: Path) -> int:
    """0 without a checkpoint."""
    with suppress(IndexError, FileNotFoundError):
        return complete_checkpoints(storage_for(str(home)).list(CHECKPOINTS))[0].step
    return 0
