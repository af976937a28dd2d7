"""The fused loss computes what the reference does, and its kernels compile for every kind of GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.pipeline.train.checkpoint.restore import newest_conditions
from slipstream.pipeline.train.checks import why_not_fused
from slipstream.pipeline.train.config import TrainingConfig, resume_settings
from slipstream.pipeline.train.loop import fused_loss
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.pipeline.train.memory.tracker import MemoryTracker
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.models.config import ModelConfig
from tests.support.training import log, rank_body, trained

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_loss"]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("torch.float32", 2e-6), ("torch.bfloat16", 2**-7), ("torch.float16", 2**-10)]
)
def test_losses_and_gradients_are_those_of_the_reference(
    dtype: str, rounding: float, interpreted: dict[str, Any]
) -> None:
    """The reference rounds a gradient in 16 bits twice; upstream gradients are up to 2.5."""
    found = {name: values for name, values in interpreted.items() if name.startswith(dtype)}
    assert len(found) == 2 * 4
    for losses, gradients, ignored in found.values():
        assert losses < 5e-6 and gradients <= 2.5 * rounding and ignored == 0


def test_infinite_logits_and_repetitions(interpreted: dict[str, Any]) -> None:
    assert max(interpreted["extremes"]) < 1e-6 and interpreted["equal bits"]


def test_the_kernels_move_little_more_than_the_least(interpreted: dict[str, Any]) -> None:
    assert 1 <= interpreted["moved over least"] <= 1.3


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
@pytest.mark.parametrize("kernel", ["losses_of_tokens", "gradients_of_tokens"])
def test_they_compile_without_a_device(
    kernel: str, target: tuple[str, Any, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.pipeline.train.loop import loss_kernels

    function = getattr(loss_kernels, kernel)
    kinds = {"target": "*i64", "smoothing": "fp32", "vocabulary": "i32", "stride": "i32", "BLOCK": "constexpr"}
    kinds |= {"logits": "*bf16", "gradient": "*bf16", **dict.fromkeys(("losses", "sums", "upstream"), "*fp32")}
    signature = {name: kinds[name] for name in function.arg_names}
    source = ASTSource(function, signature, constexprs={"BLOCK": fused_loss.LARGEST_BLOCK})
    made = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    binary = made.asm["hsaco" if target[0] == "hip" else "cubin"]
    assert kernel.encode() in binary and "atom" not in made.asm["amdgcn" if target[0] == "hip" else "ptx"]


def test_a_trace_counts_one_tensor_of_the_gradients_size() -> None:
    def peak(fused: bool) -> int:
        with FakeTensorMode(), MemoryTracker() as tracker:
            logits = torch.empty(512, 4096, dtype=torch.bfloat16, requires_grad=True)
            losses = token_losses(logits, torch.zeros(512, dtype=torch.int64), fused=fused)
            torch.autograd.grad(losses.sum(), logits)
        return tracker.peak

    size = 512 * 4096 * 2
    assert 2 * size < peak(True) < 2.01 * size and peak(False) > 3 * size


def test_a_cpu_and_64_bits_take_the_reference() -> None:
    assert why_not_fused(torch.device("cpu")) == "not a GPU"
    logits = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(token_losses(logits, torch.arange(3), fused=True), token_losses(logits, torch.arange(3)))


def body_with_kernels(rank: int, world: int, *arguments: Any) -> None:
    """As on a machine whose first GPU has the kernels, and whose second lacks Triton."""
    from slipstream.pipeline.train import run
    from slipstream.pipeline.train.loop import objective

    def noted(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        print("a fused loss", flush=True)
        losses: Tensor = objective.TokenLosses.apply(logits, target, smoothing)
        return losses

    vars(run)["why_not_fused"] = lambda _: "Triton is missing" if rank else ""
    vars(objective)["fused_token_losses"] = noted
    rank_body(rank, world, *arguments)


@pytest.mark.parametrize(
    ("world", "kernels", "found"), [(1, "auto", "fused"), (1, "reference", "reference"), (2, "auto", "reference")]
)
def test_all_ranks_agree_and_a_checkpoint_records_it(world: int, kernels: Any, found: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 12, (16, 9))
    data = write_token_rows(tmp_path / "data", {"train": rows, "validation": rows[:4]}, 12).artifact.directory
    model = ModelConfig("transformer", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1})
    training = TrainingConfig(epochs=1, batch_size=8, kernels=kernels, checkpoint_every=1)
    place = tmp_path / "run"
    trained(data, place, world, training, model, body=body_with_kernels)
    assert ("a fused loss" in log(place)) is (found == "fused")
    conditions = newest_conditions(str(place / "checkpoints"), Holder(), "auto", "")
    assert conditions is not None and conditions["loss"] == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_on_which_the_kernels_fail_has_a_reason() -> None:
    found = why_not_fused(torch.device("cuda", 0))
    assert found and "\n" not in found


def test_the_choice_is_part_of_no_identity() -> None:
    assert resume_settings(TrainingConfig()) == resume_settings(TrainingConfig(kernels="reference"))
