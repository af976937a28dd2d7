"""What is known of memory before a training starts, and how long a pod waited for the others."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.artifacts.prepared.data import Signature, TensorSpec
from slipstream.artifacts.results import bottleneck as causes
from slipstream.artifacts.results.training import read_attempt
from slipstream.errors import UserError
from slipstream.models.config import ModelConfig
from slipstream.models.factory import build
from slipstream.telemetry import preflight
from slipstream.telemetry.preflight import GpuMemory
from slipstream.telemetry.records import WAITED_FOR_PODS
from slipstream.train.checks import check_memory, lasting_bytes
from slipstream.train.config import TrainingConfig
from slipstream.train.parallel.config import ParallelConfig
from tasks.flyte.other_pods import waiting_for_pods
from tests.support.training import table_of_numbers, trained

SIGNATURE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
GPU = torch.device("cuda", 0)


def test_what_lasts_from_step_to_step_is_counted_by_hand() -> None:
    model = build(ModelConfig(arguments={"hidden": [7]}), SIGNATURE, 0)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert lasting_bytes(model, TrainingConfig()) == 4 * 4 * numbers
    assert lasting_bytes(model, TrainingConfig(ema=0.9)) == 5 * 4 * numbers
    frozen, *_ = model.parameters()
    frozen.requires_grad_(False)
    assert lasting_bytes(model, TrainingConfig()) == 4 * (4 * numbers - 3 * frozen.numel())


def test_a_gpu_that_others_hold_is_refused_before_anything_is_copied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(ModelConfig(arguments={"hidden": [7]}), SIGNATURE, 0)
    needed = lasting_bytes(model, TrainingConfig())
    room = GpuMemory("GPU 0 (NVIDIA L4)", 24 << 30, needed - 1, 20 << 30, ("python (process 41)",), 1)
    monkeypatch.setattr(preflight, "visible_memory", lambda *_: [room])
    with pytest.raises(UserError, match=r"GPU 0 .* held by python \(process 41\)"):
        check_memory(model, TrainingConfig(), GPU)
    check_memory(model, TrainingConfig(), torch.device("cpu"))
    check_memory(model, TrainingConfig(parallel=ParallelConfig(shard="weights")), GPU)
    monkeypatch.setattr(preflight, "visible_memory", lambda *_: [replace(room, free_bytes=needed)])
    check_memory(model, TrainingConfig(), GPU)


def test_workers_know_how_long_their_pod_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAITED_FOR_PODS, "9999")
    with waiting_for_pods("train", 1) as waiting:
        waiting.all_met()
    assert WAITED_FOR_PODS not in os.environ, "a job of one pod waits for nobody"
    with waiting_for_pods("train", 2) as waiting:
        time.sleep(0.2)
        waiting.all_met()
        first = os.environ[WAITED_FOR_PODS]
        time.sleep(0.05)
        waiting.all_met()  # for each worker
    assert 0.2 <= float(first) < 5 and os.environ[WAITED_FOR_PODS] == first


def test_late_pods_are_named(tmp_path: Path) -> None:
    data, settings = table_of_numbers(tmp_path / "data", 900), TrainingConfig(epochs=3, batch_size=30, patience=0)
    model = trained(data, tmp_path / "run", 1, settings, environment={WAITED_FOR_PODS: "600"})
    found = read_attempt(model).bottleneck
    assert found is not None and found.verdict == causes.LATE_PODS and "waited 600 s for the others" in found.sentence
    assert found.shares[causes.LATE_PODS] == pytest.approx(600 / (600 + found.seconds))
