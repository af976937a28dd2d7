"""Facts of the machine, and the tests that need a GPU."""

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

from slipstream.operations.doctor.node import driver_problem, torch_cuda
from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.torch_names import missing_names
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.machine.nvml import ask_nvml

GIB = 1 << 30
#: Tests that need a GPU, below the root of a clone.
TESTS = "tests/gpu_proof"


def versions(context: CheckContext) -> Iterator[CheckFigure]:
    """Fail if the driver is too old for this torch, or if torch sees fewer GPUs than the driver."""
    yield CheckFigure("Python", platform.python_version())
    yield CheckFigure("torch", torch.__version__)
    assert "fallback_to_soft" in signature(FileLock.__init__).parameters, "filelock is too old: pip install filelock>=4"
    missing = missing_names()
    yield CheckFigure("names that torch lacks", float(len(missing)), ", ".join(missing))
    if context.device.type == "cpu":
        yield CheckFigure("device", "the CPU")
        return
    yield CheckFigure("CUDA", torch_cuda() or f"ROCm {torch.version.hip}")
    if dist.is_nccl_available():
        yield CheckFigure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    driver = ask_nvml(lambda nvml: (nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()))
    if driver:
        yield CheckFigure("driver", driver[0])
        problem = driver_problem(driver[1] // 1000, torch_cuda())
        assert not problem, problem
    properties = torch.cuda.get_device_properties(context.device)
    yield CheckFigure("device", properties.name)
    yield CheckFigure("memory", properties.total_memory / GIB, "GiB")
    yield CheckFigure("multiprocessors", float(properties.multi_processor_count))
    yield CheckFigure("capability", f"{properties.major}.{properties.minor}")
    assert visible_gpus() == context.devices, f"torch sees {context.devices} GPUs, slipstream.machine {visible_gpus()}"


def marked_tests(context: CheckContext) -> Sequence[CheckFigure]:
    """Run ``tests/gpu_proof`` without fixtures of other tests, which need more libraries."""
    if not (ROOT / TESTS).is_dir():
        raise CannotRun(f"{TESTS} is missing here: run the command in a clone of the project")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--confcutdir={TESTS}"]
    ended = subprocess.run([*command, TESTS], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    print(ended.stdout, ended.stderr)
    counts = {state: int(number) for number, state in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout)}
    assert ended.returncode == 0, ", ".join(re.findall(r"^FAILED (\S+)", ended.stdout, re.M)) or ended.stderr[-300:]
    if not counts.get("passed"):
        raise CannotRun(f"{counts.get('skipped', 0)} tests need a GPU")
    return [CheckFigure(state, float(number), "tests") for state, number in counts.items()]
