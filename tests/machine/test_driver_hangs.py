"""A hanging driver is reported, and not taken for a machine without GPUs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.flyte import stage
from slipstream.operations.doctor import node
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from slipstream.shared.machine import nvml
from slipstream.shared.machine.nvml import DriverHangs, in_time
from tests.support.fake_nvml import FakeNvml
from tests.support.wording import line_with, same_wording

ASK = """
from slipstream.shared.machine import gpus, nvml
nvml.DRIVER_S = 1.0
print(gpus.visible_gpus())
"""


def test_counting_devices_of_a_driver_that_hangs_ends(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path / "nvml")
    words = [sys.executable, "-c", ASK]

    def asked() -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=nvml.environment(), cwd=ROOT, capture_output=True, text=True, timeout=30)

    assert asked().stdout == "2\n"
    nvml.play("hang nvmlDeviceGetCount_v2")
    hung = asked()
    assert hung.returncode == 1
    same_wording(line_with("NVIDIA's", hung.stderr))


def test_what_the_question_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_time(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0)
    monkeypatch.setattr(nvml, "DRIVER_S", 0.05)
    with pytest.raises(DriverHangs):
        in_time(lambda: time.sleep(5))


def test_the_doctor_says_so_and_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "DRIVER_S", 0.05)
    monkeypatch.setattr(node, "nvidia_readings", lambda *_: time.sleep(5))
    found = {reading.what: reading.found for reading in node.read_node()}
    assert "DriverHangs" in found["NVIDIA driver"] and found["CPU"]


@pytest.mark.parametrize("local", [True, False])
def test_on_another_node_it_is_tried_again(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "runs_locally", lambda: local)
    expected = UserError if local else stage.FlyteRecoverableException
    with pytest.raises(expected, match="driver"), stage.mapped_errors():
        raise DriverHangs("the driver hangs")
