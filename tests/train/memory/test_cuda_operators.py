"""Traces run the operators of a GPU, also without one, and their peaks are those that were measured on one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.operations.proofs.gpu.timed import B1, M125
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.documents import MOST_DOCUMENTS
from slipstream.pipeline.train.memory.choices import TraceJob
from slipstream.pipeline.train.memory.processes import TraceFailure, trace_footprints
from slipstream.pipeline.train.memory.trace import TracedStep, trace_footprint
from slipstream.pipeline.train.memory.tracker import cuda_operators, scratch_bytes
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig

GIB = 2**30
ROWS, LENGTH, VOCABULARY = 16, 2048, 50_304
#: The reference computed the loss of all measured trainings:
#: ``max_memory_allocated`` in GiB on an H100 80GB with torch 2.11, where DDP had buckets of 4 bytes a weight.
MEASURED: dict[str, tuple[dict[str, Any], int, dict[str, Any], float]] = {
    "125M": (M125, ROWS, {}, 22.0),
    "125M, documents apart by a mask": (M125, ROWS, {"documents": MOST_DOCUMENTS + 1}, 23.5),
    "125M, recompute": (M125, ROWS, {"recompute": "full"}, 11.9),
    "125M, accumulation": (M125, ROWS, {"accumulation": 4}, 7.6),
    "1.1B": (B1, 8, {}, 48.1),
}

#: The same of the 125 M transformer on an H200, every training in a process of its own, which has no DDP.
MEASURED_WITHOUT_DDP: dict[str, tuple[dict[str, Any], float]] = {
    "defaults": ({}, 21.53),
    "recompute": ({"recompute": "full"}, 11.40),
    "accumulation": ({"accumulation": 4}, 7.15),
    "FSDP2": ({"parallel": {"shard": "weights"}}, 21.28),
    "ema": ({"ema": 0.99}, 21.99),
}


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def run(call: Callable[[], Tensor]) -> list[str]:
    """The attention and normalisation kernels of a forward and backward pass on a GPU."""
    with FakeTensorMode(), Operators() as operators, cuda_operators():
        call().sum().backward()
    return [name for name in operators.names if "attention" in name or "norm" in name]


def heads(number: int, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> Tensor:
    return torch.empty(2, number, 128, size, dtype=dtype, requires_grad=True)


FLASH = ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]
attend = functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("dtype", "given", "kernels"),
    [
        (torch.bfloat16, {"is_causal": True}, FLASH),
        (torch.float16, {"is_causal": True, "dropout_p": 0.1}, FLASH),
        (torch.bfloat16, {"is_causal": True, "keys": 2, "enable_gqa": True}, FLASH),
        (torch.float32, {"is_causal": True}, EFFICIENT),
        (torch.bfloat16, {"mask": torch.bool}, EFFICIENT),
        (torch.bfloat16, {"mask": torch.bfloat16, "keys": 2, "enable_gqa": True}, EFFICIENT),
    ],
)
def test_attention_is_a_kernel_of_cuda(dtype: torch.dtype, given: dict[str, Any], kernels: list[str]) -> None:
    more = {name: value for name, value in given.items() if name not in ("mask", "keys")}

    def call() -> Tensor:
        query, key = heads(8, dtype), heads(given.get("keys", 8), dtype)
        mask = torch.empty(2, 1, 128, 128, dtype=given["mask"]) if "mask" in given else None
        found = functional.scaled_dot_product_attention(query, key, key, attn_mask=mask, **more)
        assert (found.shape, found.dtype) == (query.shape, dtype)
        return found

    assert run(call) == kernels


def test_autocast_decides_the_kernel() -> None:
    def call() -> Tensor:
        query = heads(8, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            return functional.scaled_dot_product_attention(query, query, query)

    assert run(call) == FLASH


def test_normalisation_is_one_operator() -> None:
    names = run(lambda: nn.RMSNorm(64)(torch.empty(2, 128, 64, requires_grad=True)))
    assert names == ["_fused_rms_norm", "_fused_rms_norm_backward"]


def test_afterwards_the_cpu_has_its_own_operators() -> None:
    run(lambda: nn.RMSNorm(64)(torch.empty(2, 128, 64, requires_grad=True)))
    assert functional.scaled_dot_product_attention is attend
    x = torch.randn(2, 8, 64, requires_grad=True)
    with Operators() as operators:
        found = nn.RMSNorm(64)(x)
        found.sum().backward()
    assert "rsqrt" in operators.names and "_fused_rms_norm" not in operators.names
    torch.testing.assert_close(found, x / (x.square().mean(2, keepdim=True) + torch.finfo(x.dtype).eps).sqrt())


def step_of(model: dict[str, Any], rows: int, documents: int = 0, **settings: Any) -> TracedStep:
    tokens = (TensorSpec("tokens", "int64", (LENGTH,)),)
    signature = Signature(tokens, "next token", "next token", buckets=VOCABULARY, document_end=0 if documents else -1)
    training = TrainingConfig.from_dict({"precision": "bf16", "batch_size": rows, "kernels": "reference", **settings})
    return replace(TraceJob(ModelConfig("transformer", model), signature, training, 1).step, documents=documents)


def peaks(steps: list[TracedStep]) -> list[tuple[float, float]]:
    """Of each step the peak and the weights, in GiB."""
    found = []
    for one in trace_footprints(steps):
        assert not isinstance(one, TraceFailure), one.reason
        found.append((one.peak / GIB, one.at_peak["parameters"] / GIB))
    return found


@pytest.mark.prove
@pytest.mark.parametrize(("device", "peak"), [("cuda", 21.44), pytest.param("cpu", 24.95, marks=pytest.mark.prove)])
def test_the_peak_of_125m_parameters_is_that_of_cuda(device: str, peak: float) -> None:
    ((found, _),) = peaks([replace(step_of(M125, ROWS), device=device)])
    assert found == pytest.approx(peak, rel=0.02)


@pytest.mark.prove
@pytest.mark.parametrize("name", MEASURED)
def test_the_peak_is_the_measured_one(name: str) -> None:
    model, rows, settings, measured = MEASURED[name]
    ((peak, buckets),) = peaks([step_of(model, rows, **settings)])
    assert peak + buckets == pytest.approx(measured, rel=0.02)


@pytest.mark.prove
@pytest.mark.parametrize("name", MEASURED_WITHOUT_DDP)
def test_the_peak_of_one_process_is_the_measured_one(name: str) -> None:
    settings, measured = MEASURED_WITHOUT_DDP[name]
    ((peak, _),) = peaks([step_of(M125, ROWS, **settings)])
    assert peak == pytest.approx(measured, rel=0.02)


@pytest.mark.prove
def test_the_fused_loss_takes_one_tensor_of_logits_less() -> None:
    (reference, _), (fused, _) = peaks([step_of(M125, ROWS, kernels=kernels) for kernels in ("reference", "auto")])
    logits = ROWS * LENGTH * VOCABULARY * 2 / GIB
    assert reference - fused == pytest.approx(logits, rel=0.05)


@pytest.mark.prove
def test_documents_apart_take_no_more_at_the_peak() -> None:
    """The scratch of their backward pass is freed before the logits of the next step."""
    (causal, _), (few, _), (most, _), (mask, _) = peaks([step_of(M125, ROWS, n) for n in (0, 2, 64, 65)])
    assert causal == pytest.approx(few, abs=1e-3) and causal == pytest.approx(most, abs=1e-3) and mask > causal + 1


@pytest.mark.parametrize(("deterministic", "sums"), [(False, 1), (True, 6)])
def test_the_scratch_of_attention_is_that_of_the_kernel(deterministic: bool, sums: int) -> None:
    """6 is 132 multiprocessors over 24 heads, rounded up."""
    import torch.nn.attention.varlen  # defines the operators

    query, key = torch.empty(64, 12, 80, dtype=torch.bfloat16), torch.empty(64, 4, 80, dtype=torch.bfloat16)
    bounds = torch.zeros(3, dtype=torch.int32)
    given = (query, query, key, key, query, query, bounds, bounds, 64, 64, True, bounds)
    found = scratch_bytes(torch.ops.torch_attn._varlen_attn_backward.default, given, deterministic)
    rows = 64 + 2 * 128
    assert found == 4 * rows * 12 * (sums * 96 + 1) + 2 * 2 * 64 * 12 * 80
    assert not scratch_bytes(torch.ops.torch_attn._varlen_attn.default, given, deterministic)


def test_a_plan_counts_the_scratch_of_every_document() -> None:
    model = {**M125, "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 32}
    small = replace(step_of(model, 2, 1), signature=replace(step_of(model, 2, 1).signature, buckets=8))
    few, most = (trace_footprint(replace(small, documents=count)).peak for count in (1, MOST_DOCUMENTS))
    # 4 and 128 sequences; 132 multiprocessors have 17 sums for the first, one for the others
    assert most - few == 4 * 2 * ((4096 + 128 * 128) * (64 + 1) - (4096 + 4 * 128) * (17 * 64 + 1)) + 4 * (129 - 5)
