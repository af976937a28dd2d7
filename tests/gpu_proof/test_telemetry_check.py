"""The check of telemetry on a GPU can fail: with a fake NVML and nvidia-smi, wrong readings and marks, and causes that
were not provoked."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.checks import telemetry
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.records import DeviceReading, Sample
from tests.support.fake_nvml import FakeNvml
from tests.support.sampler_process import device, sample

UUID = "GPU-00000000-0000"
#: What the fake NVML plays: percent, MiB, watts.
RIGHT = (60, 19_500_000_000 / 2**20, 100)
READING, NOW = device(), 1.7e9


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CheckContext]:
    (tmp_path / "work").mkdir()
    with mock.patch.dict(os.environ):
        yield CheckContext(torch.device("cpu"), 2, tmp_path / "work", tmp_path, small=True)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``tool(60, "[N/A]", 100)`` is what nvidia-smi says from then on, of the first of two GPUs of a fake NVML."""
    for name, value in FakeNvml(tmp_path / "nvml").environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def says(*cells: object) -> None:
        path = tmp_path / "nvidia-smi"
        words = f'case "$*" in *--id={UUID}*) echo "{", ".join(map(str, cells))}" ;; *) exit 6 ;; esac'
        path.write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o755)

    return says


def compared(directory: Path) -> dict[str, float | str]:
    figures = telemetry.beside_tool(directory / "samples", UUID, lambda seconds: None, seconds=4, settling=1)
    return {figure.name: figure.value for figure in figures}


@pytest.mark.prove
def test_readings_like_the_tools_hold(tmp_path: Path, tool: Callable[..., None]) -> None:
    tool(*RIGHT)
    found = compared(tmp_path)
    assert found["utilisation"] == pytest.approx(60) and found["power"] == pytest.approx(100)
    assert {name for name in found if "apart" not in name} == {"utilisation", "memory", "power", "energy"}
    assert all(value < 5 for name, value in found.items() if "apart" in name and isinstance(value, float))


@pytest.mark.prove
def test_a_tool_that_says_a_tenth_more_fails(tmp_path: Path, tool: Callable[..., None]) -> None:
    tool(*RIGHT[:2], 1.1 * RIGHT[2])
    with pytest.raises(AssertionError, match=r"^power: 100 W, nvidia-smi says 110"):
        compared(tmp_path)


def figures(
    reading: DeviceReading, *, joules: float = 350, told: telemetry.ToolReading | None = None
) -> list[CheckFigure]:
    """Return the figures of ten seconds with these readings and ``joules`` per second."""
    readings = [replace(reading, energy_joules=joules * second) for second in range(11)]
    samples = [sample(NOW + second, each) for second, each in enumerate(readings)]
    its = told or telemetry.ToolReading(NOW, READING.busy, READING.memory_used_bytes, READING.power_watts)
    return list(telemetry.compared(readings, samples, [its]))


@pytest.mark.parametrize(
    ("name", "field"),
    [("utilisation", "busy"), ("memory", "memory_used_bytes"), ("power", "power_watts"), ("energy", "")],
)
def test_each_reading_may_be_a_twentieth_off_and_no_more(name: str, field: str) -> None:
    def changed(by: float) -> list[CheckFigure]:
        if not field:
            return figures(READING, joules=by * 350.5)
        return figures(replace(READING, **{field: by * getattr(READING, field)}), joules=350.5)

    for by in (0.96, 1.04):
        assert len(changed(by)) == 8
    for by in (0.94, 1.06):
        with pytest.raises(AssertionError, match=f"^{name}: "):
            changed(by)


def test_what_only_one_of_both_says_fails_and_what_neither_says_is_said() -> None:
    told = telemetry.ToolReading(NOW, None, READING.memory_used_bytes, READING.power_watts)
    with pytest.raises(AssertionError, match=r"^utilisation: 0\.5 was read"):
        figures(READING, told=told)
    silent = replace(READING, busy=None)
    with pytest.raises(AssertionError, match="nothing was read"):
        figures(silent)
    assert figures(silent, told=told)[0] == CheckFigure("utilisation", "neither says")


@pytest.mark.parametrize(("cell", "value"), [("61.5", 61.5), (" 0", 0.0), ("[N/A]", None), (" [Not Supported]", None)])
def test_cells_of_the_tool(cell: str, value: float | None) -> None:
    assert telemetry.number(cell) == value


@pytest.mark.prove
def test_parts_of_a_gpu_are_not_compared(tmp_path: Path, tool: Callable[..., None]) -> None:
    tool(*RIGHT)
    (tmp_path / "nvml/behaviour").write_text("mig 0\n")
    with (
        mock.patch.object(telemetry, "ask_tool", lambda uuid: telemetry.ToolReading(telemetry.time.time(), 1, 1, 1)),
        pytest.raises(CannotRun, match="parts of a GPU"),
    ):
        list(telemetry.beside_tool(tmp_path / "samples", "GPU-other", lambda seconds: None, seconds=3, settling=1))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cpu_seconds": lambda seconds: 0.01 * seconds}, "this process alone took"),
        pytest.param({"cpu_seconds": lambda seconds: 1000 * seconds}, "all processes took", marks=pytest.mark.prove),
        pytest.param({"memory_used_bytes": lambda used: 1 << 20}, "bytes used", marks=pytest.mark.prove),
        pytest.param({"memory_limit_bytes": lambda limit: 1 << 60}, "bytes allowed", marks=pytest.mark.prove),
    ],
)
def test_readings_of_the_host_that_are_wrong_fail(
    tmp_path: Path, changed: dict[str, Callable[[Any], Any]], said: str
) -> None:
    read = ring.read_samples

    def wrong(directory: Path) -> list[Sample]:
        return [
            replace(sample, host=replace(sample.host, **{k: f(getattr(sample.host, k)) for k, f in changed.items()}))
            for sample in read(directory)
        ]

    with mock.patch.object(ring, "read_samples", wrong), pytest.raises(AssertionError, match=said):
        list(telemetry.beside_proc(tmp_path))


@pytest.mark.prove
def test_causes_that_were_not_made_are_not_named(place: CheckContext) -> None:
    with (
        mock.patch.object(telemetry, "provocations", lambda cause: ()),
        pytest.raises(AssertionError, match="slow loader"),
    ):
        list(telemetry.causes(place))


@pytest.mark.parametrize("name", ["before_step", "enqueued"])
def test_a_mark_that_waits_is_found(place: CheckContext, name: str) -> None:
    mark = getattr(Guard, name)

    def waits(*arguments: Any) -> Any:
        torch.ones(1).item()
        return mark(*arguments)

    with mock.patch.object(Guard, name, waits), pytest.raises(AssertionError, match="makes the host wait"):
        list(telemetry.no_waits(place))


def test_steps_without_a_wait_are_counted(place: CheckContext) -> None:
    steps = telemetry.EPOCHS * telemetry.STEPS - 4
    assert list(telemetry.no_waits(place)) == [CheckFigure("without a wait", float(steps), "steps")]
