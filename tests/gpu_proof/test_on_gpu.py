"""Single tests of `make gpu`: on a GPU, and as far as possible on the CPU."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER
from slipstream.pipeline.train.checkpoint.staging import pin_memory
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.device_clock import (
    BEFORE,
    StepProfiler,
    device_clock,
    measured_peak,
    same_gpu,
    synchronise_device,
)
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.pipeline.train.loop.state import kernels_configured
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results.training import OPERATIONS
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning
from slipstream.shared.machine.gpus import data_sheet_peak, gpu_names, visible_gpus
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="torch sees no GPU")
pytestmark = pytest.mark.gpu
LENGTH = 64
SIGNATURE = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=256)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if GPU else torch.device("cpu")


def products(device: torch.device, count: int) -> None:
    large = torch.ones(4096 if GPU else 256, 4096 if GPU else 256, device=device)
    for _ in range(count):
        large @ large


def test_the_clock_tells_when_the_device_was_done(device: torch.device) -> None:
    products(device, 2)
    synchronise_device(device)
    clock = device_clock(device)
    first = clock.mark().wait()
    products(device, 50)
    mark = clock.mark()
    synchronise_device(device)
    done = time.perf_counter()
    assert first < mark.wait() <= done + 1e-3
    if GPU:
        assert done - mark.wait() < 0.1 * (done - first) + 5e-3


@needs_gpu
def test_the_driver_names_the_gpus_that_torch_sees() -> None:
    assert visible_gpus() == torch.cuda.device_count()
    if torch.version.cuda:
        assert torch.cuda.get_device_name(0) in gpu_names()


@needs_gpu
def test_a_gpu_multiplies_as_fast_as_its_data_sheet_says_and_no_faster(device: torch.device) -> None:
    peak = data_sheet_peak(torch.cuda.get_device_name(device), "bf16")
    if peak is None:
        pytest.skip(f"{torch.cuda.get_device_name(device)} is not in the table")
    assert 0.3 * peak < measured_peak(device, "bf16") < 1.05 * peak


@needs_gpu
def test_a_real_lack_of_memory_is_known_as_one(device: torch.device) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert error_meaning(raised.value) is ErrorMeaning.MEMORY


@needs_gpu
def test_memory_of_the_host_is_pinned_and_copied_to_without_waiting(device: torch.device) -> None:
    memory = torch.zeros(64 << 20, dtype=torch.uint8)
    pin_memory(memory)
    assert memory.is_pinned()
    source = torch.arange(memory.numel(), device=device).to(torch.uint8)
    products(device, 50)
    started = time.perf_counter()
    memory.copy_(source, non_blocking=True)
    begun = time.perf_counter() - started
    synchronise_device(device)
    assert begun < 0.5 * (time.perf_counter() - started), "the copy waited for the products before it"
    assert torch.equal(memory, source.cpu())


def test_a_thread_is_on_the_gpu_of_the_one_that_started_it() -> None:
    if GPU:
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    seen: list[int] = []
    begin = same_gpu()

    def body() -> None:
        begin()
        seen.append(torch.cuda.current_device() if GPU else -1)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [torch.cuda.device_count() - 1]


def step(device: torch.device) -> Iterator[torch.Tensor]:
    """The gradients of a small transformer, from the same weights on the same rows."""
    model = build_model(ModelConfig("transformer", SMALL_TRANSFORMER), SIGNATURE, seed=0).to(device)
    tokens = (torch.arange(8 * LENGTH).view(8, LENGTH) * 7 % 256).to(device)
    token_losses(model(tokens).flatten(0, 1), tokens.flatten()).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def test_the_same_step_has_the_same_bits(device: torch.device) -> None:
    with kernels_configured(TrainingConfig()):
        for one, other in zip(step(device), step(device), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_that_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.randn(64, 1000, device=device).to(dtype).requires_grad_()
    target = torch.randint(0, 1000, (64,), device=device)
    ours, theirs = token_losses(logits, target), functional.cross_entropy(logits.float(), target, reduction="none")
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
    (gradient,), (expected,) = (torch.autograd.grad(loss.sum(), logits) for loss in (ours, theirs))
    torch.testing.assert_close(gradient, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_of_shared_heads_takes_no_square_of_the_length(device: torch.device, dtype: torch.dtype) -> None:
    length = 8192
    signature = Signature((TensorSpec("tokens", "int64", (length,)),), "next token", "next token", buckets=256)
    model = build_model(ModelConfig("transformer", SMALL_TRANSFORMER), signature, seed=0).to(device)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        model(tokens)
    square = length * length * SMALL_TRANSFORMER["num_attention_heads"] * dtype.itemsize
    assert torch.cuda.max_memory_allocated(device) < square / 2


def test_a_profile_holds_no_more_time_than_there_was(device: torch.device) -> None:
    steps = 2
    profiler = StepProfiler(steps, device)
    synchronise_device(device)
    started = time.perf_counter()
    with profiler:
        for _ in range(BEFORE + steps + 1):
            products(device, 5)
            profiler.step()
        synchronise_device(device)
    assert 0 < json.loads(profiler.files[OPERATIONS])["seconds"] < time.perf_counter() - started
