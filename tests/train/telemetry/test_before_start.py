"""Memory at the start of a training, and a pod's waiting time for the others."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.flyte.before_start import waiting_for_pods
from slipstream.pipeline.train.checks import check_memory
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.memory.lasting import ModelState
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results import devices as causes
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.telemetry import preflight
from slipstream.shared.telemetry.preflight import GpuMemory
from slipstream.shared.telemetry.records import WAITED_FOR_PODS
from tests.support.training import table_of_numbers, trained
from tests.support.wording import refuses

SIGNATURE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
GPU = RankContext(0, 1, torch.device("cuda", 0), "nccl")


def test_a_gpu_that_others_hold_is_refused_before_anything_is_copied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelConfig(arguments={"hidden": [7]}), SIGNATURE, 0)
    needed = ModelState.of(model, TrainingConfig()).of_process(ParallelConfig(), 1, 1, "fp32")
    room = GpuMemory("GPU 0 (NVIDIA L4)", 24 << 30, needed - 1, 20 << 30, ("python (process 41)",), 1)
    uuids = ["mine", "other"]
    gpus = {"GPU-mine": room, "GPU-other": replace(room, total_bytes=needed - 1, free_bytes=0)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    monkeypatch.setattr(preflight, "visible_memory", lambda hiding: [gpus[hiding["CUDA_VISIBLE_DEVICES"]]])
    with refuses(UserError):
        check_memory(model, TrainingConfig(), GPU, "fp32")
    check_memory(model, TrainingConfig(), replace(GPU, device=torch.device("cpu")), "fp32")
    offload = ParallelConfig(shard="weights", offload=True)
    check_memory(model, TrainingConfig(parallel=offload), GPU, "fp32")
    gpus["GPU-mine"] = replace(room, free_bytes=needed)
    check_memory(model, TrainingConfig(), GPU, "fp32")  # whatever others do with theirs
    with refuses(UserError):
        check_memory(model, TrainingConfig(), replace(GPU, device=torch.device("cuda", 1)), "fp32")


def test_workers_know_how_long_their_pod_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAITED_FOR_PODS, "9999")
    with waiting_for_pods("train", 1) as waiting:
        waiting.all_met()
    assert WAITED_FOR_PODS not in os.environ, "a job of one pod does not wait"
    with waiting_for_pods("train", 2) as waiting:
        time.sleep(0.2)
        waiting.all_met()
        first = os.environ[WAITED_FOR_PODS]
        time.sleep(0.05)
        waiting.all_met()  # for each worker
    assert 0.2 <= float(first) < 5 and os.environ[WAITED_FOR_PODS] == first


@pytest.mark.prove
def test_late_pods_are_named(tmp_path: Path) -> None:
    data, settings = table_of_numbers(tmp_path / "data", 900), TrainingConfig(epochs=3, batch_size=30, patience=0)
    model = trained(data, tmp_path / "run", 1, settings, environment={WAITED_FOR_PODS: "600"})
    found = read_attempt(model).bottleneck
    assert found is not None and found.verdict == causes.LATE_PODS and "waited 600 s for the others" in found.sentence
    assert found.shares[causes.LATE_PODS] == pytest.approx(600 / (600 + found.seconds))
