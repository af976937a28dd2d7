"""The host runs ahead of the device; recorded times are still the device's.

A stand-in for a GPU: work that it is given ends later, one after the other, and its marks come when it does.
"""

import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.device_clock import DeviceClock, DeviceMark
from tests.support.training import table_of_numbers

STEPS, STEP_S = 24, 0.04


class StandIn(DeviceClock):
    """Ends its work later."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def work(self, seconds: float) -> float:
        """Take in work; returns when it will be done."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return self.free_at

    def mark(self) -> DeviceMark:
        return Later(max(self.free_at, time.perf_counter()))


@dataclass(frozen=True)
class Later:
    at: float

    def wait(self) -> float:
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return self.at


def body(prepared: Path, place: Path, port: int, batch_s: float) -> None:
    """Train with a stand-in for the device, on which each step takes STEP_S, and batches that take ``batch_s``."""
    import torch

    from slipstream.pipeline.train import data_loader as loader
    from slipstream.pipeline.train.checkpoint.home import Retention
    from slipstream.pipeline.train.checkpoint.manager import Checkpoints
    from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
    from slipstream.pipeline.train.checkpoint.state import AppState
    from slipstream.pipeline.train.config import TrainingConfig
    from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
    from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
    from slipstream.pipeline.train.fault_tolerance.guard import Guard
    from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
    from slipstream.pipeline.train.loop import train_loop
    from slipstream.pipeline.train.loop.optimizer import make_optimizer
    from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
    from slipstream.pipeline.train.loop.step import StepResult
    from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
    from slipstream.shared.artifacts.prepared.data import PreparedData
    from slipstream.shared.distributed.process_group import process_group
    from slipstream.shared.models.config import ModelConfig
    from slipstream.shared.models.factory import build_model

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    clock, ends, ahead, ledger_ahead = StandIn(), list[float](), list[int](), list[int]()
    gather = loader.StoredRows.gather

    def slow_gather(*arguments: Any) -> None:
        time.sleep(batch_s)
        gather(*arguments)

    loader.StoredRows.gather = slow_gather  # type: ignore[method-assign,assignment]
    loader.BUFFER_BATCHES = 1
    with process_group() as group, NoticeWatcher([], grace_s=None) as watcher:
        data = PreparedData.open(prepared)
        config = TrainingConfig(epochs=STEPS, batch_size=128, patience=0, evaluate_every=STEPS)
        model = build_model(ModelConfig(arguments={"hidden": [4]}), data.signature, 0)
        state = TrainingState(
            ReplicatedModel(model),
            make_optimizer(model, config),
            LossScaler(group.device, enabled=False),
            copy_weights(model),
            Progress(),
        )
        checkpoints = Checkpoints(
            str(place / "home"),
            AppState(model, state.optimizer),
            ResumePolicy({}),
            retention=Retention(last=100),
            clock=clock,
        )
        recorder = GoodputRecorder(checkpoints.home, 1, 1, writes=False, started=time.perf_counter())

        def given(*_: Any) -> StepResult:
            now = time.perf_counter()
            ahead.append(sum(end > now for end in ends))
            ledger_ahead.append(recorder.record.last_step - sum(end <= now for end in ends))
            ends.append(clock.work(STEP_S))
            return StepResult([torch.ones(())], torch.zeros(()))

        train_loop.train_step = given  # type: ignore[assignment]
        guard = Guard(checkpoints, CheckpointInterval(seconds=6.5 * STEP_S), watcher, recorder, clock)
        guard.begin(0)
        began = time.perf_counter()
        loop = train_loop.TrainLoop(state, data, config, group, "fp32", guard)
        loop.run(lambda *_: pytest.fail("it went back"))
        wall = time.perf_counter() - began
        checkpoints.finish()
        guard.close()
        saved = sorted(int(path.name[5:17]) for path in (place / "home").glob("step-*"))
        found = {
            "ahead": ahead,
            "ledger_ahead": max(ledger_ahead),
            "wall": wall,
            "saved": saved,
            **recorder.record.seconds,
        }
        (place / "found.json").write_text(json.dumps(found))


def recorded(place: Path, batch_s: float) -> dict[str, Any]:
    prepared = table_of_numbers(place / "prepared", 128)
    process = FORK.Process(target=body, args=(prepared, place, free_port(), batch_s), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return json.loads((place / "found.json").read_text())


def test_the_host_is_two_steps_ahead_at_most_and_the_record_tells_the_devices_time(tmp_path: Path) -> None:
    found = recorded(tmp_path, batch_s=0.7 * STEP_S)
    # Given the next step, the device has at most two to do, and mostly has some.
    assert max(found["ahead"]) <= 2 and sum(found["ahead"]) > STEPS / 2
    assert found["ledger_ahead"] <= 0, "no step is counted before it is finished"
    assert found["steps"] == pytest.approx(STEPS * STEP_S, rel=0.05)
    # The host waits for every batch, the device for the first alone: without overlap it would be 0.7.
    assert found["data_wait"] < 0.6 * STEPS * STEP_S
    # A checkpoint every six or seven steps, by the device's time for a step; by the host's it would be every thousand.
    assert len(found["saved"]) >= 2
    assert all(4 <= later - earlier <= 9 for earlier, later in pairwise(found["saved"][1:]))


@pytest.mark.prove
def test_a_device_that_waits_for_data_is_recorded_as_such(tmp_path: Path) -> None:
    found = recorded(tmp_path, batch_s=2 * STEP_S)
    assert found["steps"] == pytest.approx(STEPS * STEP_S, rel=0.05)
    # Each batch takes a step's time longer than the step; a few were read ahead.
    assert 0.7 * STEPS * STEP_S < found["data_wait"] < found["wall"] - found["steps"]
