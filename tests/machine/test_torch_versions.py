"""The supported range of torch, and its differences by the names that older and newer versions have."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from slipstream.shared.errors import UserError
from slipstream.shared.machine import torch_versions
from slipstream.shared.machine.torch_versions import NEWEST, OLDEST, check_torch, release_text, wrap_in_ddp
from tests.support import REPOSITORY


def test_the_range_is_that_of_the_package_and_of_the_constraints() -> None:
    dependencies = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={release_text(OLDEST)}" in dependencies
    assert re.search(
        rf"^torch=={re.escape(release_text(NEWEST))}\.\d+$", (REPOSITORY / "constraints.txt").read_text(), re.M
    )


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0", "2.13.0a0+git1c6d2f"])
def test_versions_in_the_range_cause_no_warning(version: str) -> None:
    assert check_torch(version) == ""


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0a0+gitabc", "3.0.1"])
def test_a_newer_version_causes_a_warning(version: str) -> None:
    assert f"torch {version}: is newer than the tested versions 2.11 to 2.13" in check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1", "unknown"])
def test_an_older_version_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=r"expected (torch )?2\.11 or newer"):
        check_torch(version)


@pytest.mark.prove
def test_without_network_the_tests_on_the_oldest_torch_are_not_run(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "test-torch-oldest", f"OLDEST={tmp_path / 'oldest'}"]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and "not run: no environment with torch 2.11\n" in ended.stdout
    assert "gpu-proof" not in ended.stdout and "torch==2.11.*" in (tmp_path / "oldest/constraints.txt").read_text()


def stderr_of(command: str, rank: str, tmp_path: Path) -> str:
    """Run a subcommand under a torch that says it is 2.99."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.99.0'\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "RANK": rank}
    ended = subprocess.run(
        [sys.executable, "-m", "slipstream", command, "--help"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.prove
def test_a_command_warns_once_and_only_on_rank_0(tmp_path: Path) -> None:
    assert stderr_of("train", "0", tmp_path).count("torch 2.99.0: is newer") == 1
    assert stderr_of("train", "1", tmp_path) == ""


def test_a_process_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(torch_versions, "check_torch", return_value="newer"), patch.dict(os.environ, {"RANK": "0"}):
        torch_versions.warn_if_untested.cache_clear()
        torch_versions.warn_if_untested()
        torch_versions.warn_if_untested()
    torch_versions.warn_if_untested.cache_clear()
    assert capsys.readouterr().err.count("newer") == 1


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_ddp_leaves_buffers_alone(alone: None) -> None:
    ddp = wrap_in_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), bucket_cap_mb=1)
    assert isinstance(ddp, DistributedDataParallel) and not ddp.will_sync_module_buffers()
    assert DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).will_sync_module_buffers()


def test_ddp_of_an_older_torch_takes_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def __init__(self, module: nn.Module, broadcast_buffers: bool = True, bucket_cap_mb: int | None = None) -> None:
            self.given = broadcast_buffers, bucket_cap_mb

    monkeypatch.setattr(torch_versions, "DistributedDataParallel", Older)
    assert vars(wrap_in_ddp(nn.Linear(2, 2), bucket_cap_mb=1))["given"] == (False, 1)


def test_collectives_are_found_by_either_name(alone: None) -> None:
    here, there = torch.arange(3.0), torch.zeros(3)
    torch_versions.all_gather_single(there, here)
    assert torch.equal(here, there)
    torch_versions.reduce_scatter_single(here, 2 * there)
    assert torch.equal(here, 2 * there)
    assert torch_versions.find_collective("not_yet", "all_reduce") is dist.all_reduce


class Lookup(nn.Module):
    """Linear layer that adds a frozen row of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.tensor([[1, 3, 129, 255]], dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.codes.dtype is torch.uint8 and not self.codes.requires_grad
        assert self.linear.weight.dtype is x.dtype
        return self.linear(x) + self.codes


def gradient_dtype(layer: nn.Linear) -> torch.dtype:
    assert layer.weight.grad is not None
    return layer.weight.grad.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_gathers_integers_in_their_own_dtype(alone: None, dtype: torch.dtype) -> None:
    model, mixed = Lookup(), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    expected = model.linear.bias.detach().to(dtype) + model.codes
    torch_versions.divide_by_fsdp(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=mixed)
    outputs = [model(torch.zeros(2, 4)) for _ in range(2)]
    assert all(torch.equal(output, expected.expand(2, 4)) for output in outputs)
    outputs[-1].sum().backward()
    assert model.codes.grad is None and gradient_dtype(model.linear) is torch.float32


def test_integers_of_an_older_fsdp_ignore_requests_for_gradients() -> None:
    with torch_versions.IntegersWithoutGradients():
        assert not torch.zeros(2, dtype=torch.uint8).requires_grad_(True).requires_grad
        assert torch.zeros(2).requires_grad_(True).requires_grad
        assert not torch.zeros(2).requires_grad_(False).requires_grad


def test_pipelines_of_an_older_torch_exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_PipelineSchedule, "_warmup_p2p", raising=False)
    with torch_versions.shapes_known_to_pipelines():
        assert not hasattr(_PipelineSchedule, "_warmup_p2p")
