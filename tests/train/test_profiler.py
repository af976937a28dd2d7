"""Profiler traces of some training steps."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from slipstream.pipeline.train.config import StepProfileConfig, TrainingConfig
from slipstream.pipeline.train.device_clock import summarise_operations
from slipstream.shared.errors import UserError
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
    assert sum(count for name, count in calls.items() if name.startswith("gloo:all_reduce")) >= 3
    seconds = [operation["seconds"] for operation in found["operations"]]
    assert seconds == sorted(seconds, reverse=True) and sum(seconds) <= found["seconds"] < 10
    trace = json.loads(gzip.decompress((model / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::addmm" for event in trace["traceEvents"]) == 3 * 2


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


def test_collectives_of_gloo_count_though_they_are_asynchronous() -> None:
    """The profiler gives them no time of their own."""
    events = EventList(
        [
            event("aten::mm", 0, 10, DeviceType.CPU),
            event("gloo:all_reduce", 2, 40, DeviceType.CPU, is_async=True),
            event("gloo:all_reduce", 50, 60, DeviceType.CPU, is_async=True),
        ]
    )
    events._build_tree()
    found = summarise_operations(events.key_averages(), 1, on_gpu=False)
    times = {each.name: (each.calls, round(1e6 * each.seconds)) for each in found.operations}
    assert times == {"gloo:all_reduce": (2, 48), "aten::mm": (1, 10)} and round(1e6 * found.seconds) == 58


def test_the_number_of_steps_is_bounded_by_the_size_of_the_trace() -> None:
    assert StepProfileConfig(steps=300).steps == 300
    with pytest.raises(UserError, match=r"training\.profile\.steps"):
        StepProfileConfig(steps=301)


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
