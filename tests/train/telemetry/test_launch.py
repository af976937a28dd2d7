"""The overhead of a pass is found where it is known, and no other model is called launch-bound."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.checks.telemetry import one_thread
from slipstream.operations.proofs.gpu.trainings import train, write_tokens
from slipstream.pipeline.train.device_clock import DeviceClock, PassedMark
from slipstream.pipeline.train.telemetry import attempt as launch
from slipstream.pipeline.train.telemetry.attempt import beyond_noise, overhead_seconds
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results import devices as causes
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.telemetry.bottleneck import DECISIVE

TABLE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b"))
TOKENS = Signature((TensorSpec("tokens", "int64", (64,)),), "next token", "next token", buckets=8)
MS = 1e-3


class Device(DeviceClock):
    """A clock that only the model below moves on, by ``fixed`` seconds a pass and ``each`` an element of the batch, but
    for the share ``noise``; a device that takes at most ``largest`` rows."""

    def __init__(self, fixed: float, each: float, noise: float = 0.0, largest: int = 10**9) -> None:
        self.now, self.fixed, self.each, self.noise, self.largest = 0.0, fixed, each, noise, largest
        self.sizes: list[int] = []
        self._random = random.Random(0)

    def mark(self) -> PassedMark:
        return PassedMark(self.now)

    def passes(self, elements: int, rows: int) -> None:
        if rows > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.sizes.append(elements)
        self.now += (self.fixed + self.each * elements) * (1 + self.noise * self._random.random())


class Timed(nn.Module):
    def __init__(self, device: Device, *, full_length: bool = False) -> None:
        super().__init__()
        self.device, self.full_length, self.weight = device, full_length, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.full_length and x.shape[1] < TOKENS.inputs[0].shape[0]:
            raise ValueError("length")
        self.device.passes(x.numel() if x.dtype == torch.int64 else len(x), len(x))
        return self.weight * x.float()


def measured(
    device: Device, rows: int, signature: Signature = TABLE, *, statistics: bool = False, full_length: bool = False
) -> float:
    model = Predictor(signature, Timed(device, full_length=full_length))
    return overhead_seconds(model, nullcontext, device, rows, on_cpu=False, has_batch_statistics=statistics)


@pytest.mark.parametrize("rows", [2, 3, 16, 100])
@pytest.mark.parametrize(("fixed", "each"), [(0.0, MS), (2 * MS, 0.0), (2 * MS, MS), (20 * MS, MS / 10)])
def test_a_known_overhead_is_measured(rows: int, fixed: float, each: float) -> None:
    device = Device(fixed, each)
    assert measured(device, rows) == pytest.approx(fixed, abs=1e-9)
    assert max(device.sizes) == rows - rows % 2, "it is the micro-batch that counts"


def test_a_device_that_two_rows_fill_has_no_overhead() -> None:
    """As long rows of tokens fill a GPU."""
    device = Device(0.0, 50 * MS, noise=0.02)
    assert measured(device, 4) == 0.0  # two rows take half as long as four, which was 49 % of overhead


def test_noise_is_no_overhead() -> None:
    for seed in range(200):
        draw = random.Random(seed)

        def passes(seconds: float, draw: random.Random = draw) -> list[float]:
            return [seconds * (1 + abs(draw.gauss(0, 0.1))) for _ in range(launch.PASSES)]

        halves, wholes = passes(0.5), passes(1.0)
        assert beyond_noise(halves, wholes) < 0.1
        assert beyond_noise(passes(0.9), passes(1.0)) == pytest.approx(0.8, abs=0.25)


def test_half_as_much_of_a_single_row_is_half_its_tokens() -> None:
    device = Device(3 * MS, MS)
    assert measured(device, 1, TOKENS) == pytest.approx(3 * MS, abs=1e-9)
    assert set(device.sizes) == {32, 64}


@pytest.mark.parametrize(
    "unknown",
    [
        lambda: measured(Device(3 * MS, MS), 1),
        lambda: measured(Device(3 * MS, MS), 1, TOKENS, full_length=True),
        lambda: measured(Device(3 * MS, MS), 3, statistics=True),
        lambda: measured(Device(3 * MS, MS, largest=8), 16),
    ],
    ids=["a row of a table", "a model of one length", "statistics of one row", "too little memory"],
)
def test_what_cannot_be_measured_is_no_overhead(unknown: Callable[[], float]) -> None:
    assert unknown() == 0.0


def test_a_mistake_of_the_model_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="length"):
        measured(
            Device(0, MS), 2, Signature((TensorSpec("tokens", "int64", (9,)),), "next token", "n"), full_length=True
        )


def test_long_passes_are_not_lengthened() -> None:
    device = Device(0.1, 0.05)
    assert measured(device, 1000) == pytest.approx(0.1)
    assert max(device.sizes) == 14, "a pass over 6 rows takes less than half a second, one over 14 takes longer"


class Busy(nn.Module):
    """Keeps its thread busy for a known time."""

    def __init__(self, fixed: float, each: float) -> None:
        super().__init__()
        self.fixed, self.each, self.weight = fixed, each, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        until = time.thread_time() + self.fixed + self.each * len(x)
        while time.thread_time() < until:
            pass
        return self.weight * x


@pytest.mark.parametrize(("fixed", "share"), [(0.0, 0.0), (8 * MS, 0.5)])
def test_on_a_cpu_it_is_the_time_of_the_thread(fixed: float, share: float) -> None:
    whole = fixed + 8 * MS
    model = Predictor(TABLE, Busy(fixed, MS))
    found = overhead_seconds(model, nullcontext, DeviceClock(), 8, on_cpu=True, has_batch_statistics=False)
    assert found / whole == pytest.approx(share, abs=0.1)


def verdicts(place: Path, sizes: Sequence[int]) -> list[causes.Bottleneck]:
    """Of trainings of a transformer, whose passes on a CPU take as long as their rows are many."""
    arguments = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = []
    with one_thread():
        for size in sizes:
            prepared = write_tokens(place / f"rows {size}", 4 * size, length=256)
            model = ModelConfig("transformer", arguments)
            settings: dict[str, Any] = {"evaluate_every": 10**6, "checkpoint_every": 10**6}
            attempt = read_attempt(
                train(place / f"model {size}", prepared, model, epochs=2, batch_size=size, **settings)
            )
            assert attempt.bottleneck is not None
            found.append(attempt.bottleneck)
    return found


@pytest.mark.prove
def test_a_training_without_overhead_is_not_launch_bound(tmp_path: Path) -> None:
    for found in verdicts(tmp_path, [1, 2, 4]):
        assert found.verdict != causes.LAUNCH and found.shares.get(causes.LAUNCH, 0.0) < DECISIVE, found.sentence
