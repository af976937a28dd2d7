"""Facts of the machine, and the tests that need it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from inspect import signature

import torch
import torch.distributed as dist
from filelock import FileLock

from slipstream.doctor.node import driver_problem, torch_cuda
from slipstream.machine.gpus import visible_gpus
from slipstream.machine.nvml import ask_nvml
from tests.support import REPOSITORY
from tests.support.gpu_proof.check import Figure, NotHere, Place
from tests.support.gpu_proof.torch_names import lacking

GIB = 1 << 30


def versions(place: Place) -> Iterator[Figure]:
    """Fails where the driver is too old for this torch, or torch sees fewer GPUs than the driver."""
    yield Figure("Python", platform.python_version())
    yield Figure("torch", torch.__version__)
    assert "fallback_to_soft" in signature(FileLock.__init__).parameters, "filelock is too old: pip install filelock>=4"
    missing = lacking()
    assert not missing, f"torch {torch.__version__} lacks {', '.join(missing)}"
    if place.device.type == "cpu":
        yield Figure("device", "the CPU")
        return
    yield Figure("CUDA", torch_cuda() or f"ROCm {torch.version.hip}")
    if dist.is_nccl_available():
        yield Figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    driver = ask_nvml(lambda nvml: (nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()))
    if driver:
        yield Figure("driver", driver[0])
        problem = driver_problem(driver[1] // 1000, torch_cuda())
        assert not problem, problem
    properties = torch.cuda.get_device_properties(place.device)
    yield Figure("device", properties.name)
    yield Figure("memory", properties.total_memory / GIB, "GiB")
    yield Figure("multiprocessors", float(properties.multi_processor_count))
    yield Figure("capability", f"{properties.major}.{properties.minor}")
    assert visible_gpus() == place.devices, f"torch sees {place.devices} GPUs, slipstream.machine {visible_gpus()}"


def marked_tests(place: Place) -> Sequence[Figure]:
    """Of ``tests/gpu_proof``, without the fixtures of all other tests, whose libraries a GPU's image may lack."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--confcutdir=tests/gpu_proof"]
    ended = subprocess.run([*command, "tests/gpu_proof"], cwd=REPOSITORY, capture_output=True, text=True)
    print(ended.stdout, ended.stderr)
    counts = {state: int(number) for number, state in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout)}
    assert ended.returncode == 0, ", ".join(re.findall(r"^FAILED (\S+)", ended.stdout, re.M)) or ended.stderr[-300:]
    if not counts.get("passed"):
        raise NotHere(f"{counts.get('skipped', 0)} tests need a GPU")
    return [Figure(state, float(number), "tests") for state, number in counts.items()]
