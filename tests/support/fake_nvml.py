"""Fake NVML: a library (``fake_nvml.c``) that processes load in place of NVIDIA's, and a module for this process.

``python -m tests.support.fake_nvml N`` prints N readings of all devices, as one line of JSON each.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slipstream.shared.machine import gpus

SOURCE = Path(__file__).with_suffix(".c")
ROOT = Path(__file__).parents[2]


class FakeNvml:
    """The library in ``directory``; ``play`` says how it behaves from then on, also in processes that run."""

    def __init__(self, directory: Path, old: bool = False) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("there is no gcc to build a fake NVML with")
        directory.mkdir(parents=True, exist_ok=True)
        self.behaviour = directory / "behaviour"
        self.directory = directory
        library = directory / "libnvidia-ml.so.1"
        name = "-Wl,-soname,libnvidia-ml.so.1"
        flags = ["-DOLD"] if old else []
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", name, *flags, "-o", library, SOURCE], check=True)
        self.play()

    def play(self, *lines: str) -> None:
        """Each line as the source explains; none: two devices that have everything."""
        scratch = self.behaviour.with_suffix(".new")
        scratch.write_text("".join(f"{line}\n" for line in lines))
        scratch.replace(self.behaviour)

    def environment(self, visible: str | None = None) -> dict[str, str]:
        """Of processes that find the library; ``visible`` is their CUDA_VISIBLE_DEVICES."""
        environment = os.environ | {"LD_LIBRARY_PATH": str(self.directory), "FAKE_NVML": str(self.behaviour)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        return environment if visible is None else environment | {"CUDA_VISIBLE_DEVICES": visible}

    def readings(self, visible: str | None = None, count: int = 1) -> list[dict[str, Any]]:
        """What a process reads of the devices, the last of ``count`` times."""
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.fake_nvml", str(count)],
            env=self.environment(visible),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])


class FourGpus:
    """Four GPUs that answer nothing but their number, name and UUID."""

    class NVMLError(Exception):
        value = 3

    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
    nvmlDeviceGetCount = staticmethod(lambda: 4)
    nvmlDeviceGetHandleByIndex = nvmlDeviceGetName = staticmethod(lambda index: index)
    nvmlDeviceGetUUID = staticmethod(lambda index: f"GPU-{index}")

    def nvmlDeviceGetMigMode(self, index: int) -> None:
        raise self.NVMLError


def see_four_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None = None) -> None:
    """Make this process count four GPUs, fewer if ``visible`` (CUDA_VISIBLE_DEVICES) hides some."""
    monkeypatch.setattr(gpus, "ask_nvml", lambda question: question(FourGpus()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def plain(reading: Mapping[str, Any]) -> dict[str, Any]:
    """A reading as JSON can hold it."""
    return dict(reading) | {"io_bytes": {"/".join(key): value for key, value in reading["io_bytes"].items()}}


if __name__ == "__main__":
    from slipstream.shared.telemetry.sampler.nvml import NvidiaDevices

    devices = NvidiaDevices()
    for _ in range(int(sys.argv[1])):
        print(json.dumps([plain(asdict(reading)) for reading in devices.read()]))
