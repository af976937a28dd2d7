"""Profiler traces of some training steps."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from slipstream.pipeline.train.config import StepProfileConfig, TrainingConfig
from slipstream.pipeline.train.device_clock import StepProfiler, summarise_operations
from slipstream.shared.models.config import ModelConfig
from tests.support.training import table_of_numbers, trained

#: 8 steps an epoch, without evaluations between them.
TRAINING = TrainingConfig(epochs=2, batch_size=64, evaluate_every=16, checkpoint_every=8, profile=StepProfileConfig(3))
TWO_LAYERS = ModelConfig(arguments={"hidden": [16]})


def test_the_operations_of_the_steps_are_counted_and_traced(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 512)
    model = trained(data, tmp_path / "run", 2, TRAINING, TWO_LAYERS)
    found = json.loads((model / "operations.json").read_text())
    calls = {operation["name"]: operation["calls"] for operation in found["operations"]}
    assert found["steps"] == 3
    assert calls["aten::addmm"] == 3 * 2
    # Two groups of parameters, with and without weight decay.
    assert calls["aten::_fused_adamw_"] == 3 * 2
    seconds = [operation["seconds"] for operation in found["operations"]]
    assert seconds == sorted(seconds, reverse=True) and sum(seconds) <= found["seconds"] < 10
    # The gradients are reduced in another thread, twice a step: all of them, and the loss.
    reduced = next(operation for operation in found["operations"] if operation["name"] == "gloo:all_reduce")
    assert reduced["calls"] >= 3 and reduced["seconds"] > 0
    trace = json.loads(gzip.decompress((model / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::addmm" for event in trace["traceEvents"]) == 3 * 2


def test_a_profile_has_as_many_steps_as_its_bytes_allow() -> None:
    """By the trace of one step; the text of a trace grows by less, as its head is written once."""
    network = torch.nn.Linear(8, 8)
    profiler, limit = StepProfiler(200, torch.device("cpu"), 100_000), 100_000
    with profiler:
        for _ in range(230):
            network(torch.ones(4, 8)).sum().backward()
            profiler.step()
    found, trace = json.loads(profiler.files["operations.json"]), gzip.decompress(profiler.files["trace.json.gz"])
    assert 1 < found["steps"] < 200 and limit / 4 < len(trace) <= limit
    calls = {operation["name"]: operation["calls"] for operation in found["operations"]}
    assert calls["aten::addmm"] == found["steps"]


@pytest.mark.prove
def test_a_run_with_a_profile_goes_on_from_one_without_and_too_few_steps_give_none(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 512)
    plain = replace(TRAINING, profile=StepProfileConfig(), epochs=2)
    trained(data, tmp_path / "run", 1, plain, TWO_LAYERS)
    for path in (tmp_path / "run" / "checkpoints").glob("step-000000000016*"):
        (path / "manifest.json").unlink()
    again = tmp_path / "run" / "again"
    trained(data, tmp_path / "run", 1, TRAINING, TWO_LAYERS, directory=again)
    assert "resumes from step 8" in (tmp_path / "run" / "again.log0").read_text()
    assert (again / "trace.json.gz").exists()
    long = replace(TRAINING, profile=StepProfileConfig(12))
    model = trained(data, tmp_path / "long", 1, long, TWO_LAYERS)
    assert (model / "attempt.json").exists() and not (model / "operations.json").exists()


def event(name: str, start: float, end: float, device: DeviceType, **more: Any) -> FunctionEvent:
    return FunctionEvent(
        id=0, name=name, thread=1, start_us=start, end_us=end, device_type=device, stack=[], use_device="cuda", **more
    )


def test_a_kernel_is_counted_once() -> None:
    """A step's events are the kernel, the operation that launched it, and annotations on host and device."""
    product = event("aten::mm", 12, 18, DeviceType.CPU)
    product.append_kernel("gemm", 0, 100)
    events = EventList(
        [
            event("ProfilerStep#5", 0, 40, DeviceType.CPU, is_user_annotation=True),
            event("Optimizer.step#AdamW.step", 10, 20, DeviceType.CPU, is_user_annotation=True),
            product,
            event("cudaLaunchKernel", 14, 16, DeviceType.CPU),
            event("Optimizer.step#AdamW.step", 20, 120, DeviceType.CUDA, is_user_annotation=True),
            event("gemm", 20, 120, DeviceType.CUDA),
        ],
        use_device="cuda",
    )
    events._build_tree()
    averages = events.key_averages()
    assert round(sum(each.self_device_time_total for each in averages)) == 300
    found = summarise_operations(averages, 1, on_gpu=True)
    assert [(each.name, each.calls) for each in found.operations] == [("gemm", 1)]
    assert round(1e6 * found.seconds) == 100
    of_host = summarise_operations(averages, 1, on_gpu=False)
    assert {each.name: round(1e6 * each.seconds) for each in of_host.operations} == {
        "Optimizer.step#AdamW.step": 4,
        "aten::mm": 4,
        "cudaLaunchKernel": 2,
    }
