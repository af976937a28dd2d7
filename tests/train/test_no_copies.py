"""A step copies nothing between host and device, and batches come from pinned memory; "meta" stands in for a device."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.operations.proofs.gpu.waits import STAND_IN, NoWaits
from slipstream.pipeline.train.batch_buffers import DeviceBuffer
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.objective import Teacher
from slipstream.pipeline.train.loop.optimizer import AveragedWeights, make_optimizer
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.models.factory import build_model, zero_inputs
from slipstream.shared.models.initial.drawn import DrawnValues
from tests.support.asked_of_cuda import Cuda
from tests.support.groups import ALONE
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few

TABLE = (TensorSpec("numeric", "float32", (5,)), TensorSpec("categorical", "int32", (2,)))
WORDS = TensorSpec("tokens", "int32", (1, 6))
IMAGE = TensorSpec("image", "uint8", (3, 8, 8))
MLP, RESNET, SIZES = ModelConfig("mlp"), ModelConfig("resnet"), {"hidden_size": 16, "num_attention_heads": 2}
KINDS = {
    "table": (MLP, Signature((*TABLE, WORDS), "classification", "y", ("a", "b"), cardinalities=(4, 4), buckets=50)),
    "regression": (MLP, Signature(TABLE, "regression", "y", cardinalities=(4, 4), target_std=3.0)),
    "images": (RESNET, Signature((IMAGE,), "classification", "y", ("a", "b"), (), (9.0,) * 3, (2.0,) * 3)),
    "tokens": (
        ModelConfig("transformer", SIZES),
        Signature((TensorSpec("tokens", "int64", (12,)),), "next token", "next", buckets=30),
    ),
}


def step_on_stand_in(kind: str, monkeypatch: pytest.MonkeyPatch, left_on_host: str = "") -> None:
    """The second of two steps on the stand-in: the first may make what later ones use. ``left_on_host`` is a buffer
    that was not moved there."""
    monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor: False)
    monkeypatch.setattr("slipstream.pipeline.train.loop.step.autocast_context", lambda precision, device: nullcontext())
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: [STAND_IN.type])
    config, signature = KINDS[kind]
    training = TrainingConfig(accumulation=2, clip_norm=0.1, ema=0.9, label_smoothing=0.1)
    model, taught = (build_model(config, signature, seed) for seed in (0, 1))
    traits = probe_model(model, torch.device("cpu"))
    for each in (model, taught):
        each.to(STAND_IN)
    if left_on_host:
        setattr(model, left_on_host, torch.zeros(1, 3, 1, 1))
    state = TrainingState(
        ReplicatedModel(model, traits),
        make_optimizer(model, training),
        LossScaler(STAND_IN, enabled=True),
        {},
        Progress(),
        traits,
        AveragedWeights(model, training.ema),
        Teacher(taught.requires_grad_(False), TeachingConfig(), "fp32"),
    )
    inputs = tuple(zero_inputs(signature, 6, STAND_IN))
    labels = [
        torch.zeros(6, *spec.shape, dtype=getattr(torch, spec.dtype), device=STAND_IN) for spec in signature.labels
    ]
    weight = None if signature.task == "next token" else torch.ones(6, device=STAND_IN)
    batch = Batch(inputs, labels[0], 5, 5, 5, 0.0, weight)
    train_step(state, training, ALONE, "fp16", batch, 10)
    with NoWaits():
        train_step(state, training, ALONE, "fp16", batch, 10)


@pytest.mark.parametrize("kind", first_few(KINDS, 2))
def test_a_step_copies_nothing_between_host_and_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step_on_stand_in(kind, monkeypatch)


def test_what_was_left_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="makes the host wait"):
        step_on_stand_in("images", monkeypatch, left_on_host="image_mean")


def test_a_rank_without_rows_makes_its_zeros_on_the_device() -> None:
    config, signature = KINDS["regression"]
    model = ReplicatedModel(build_model(config, signature, 0).to(STAND_IN))
    with NoWaits():
        model.accumulate(zero_inputs(signature, 0, STAND_IN), [slice(0, 0)], lambda outputs, _: outputs.sum() * 0)


def divided_images() -> list[str]:
    """Where the parts of a model of images hold what they standardise by, divided for the stand-in."""
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout

    config, signature = KINDS["images"]
    layout = Layout.connect(ParallelConfig(shard="weights"), dist.get_rank(), 2, torch.device("cpu"))
    model = build_model(config, signature, 0)
    divided = divide_model(
        model, layout, STAND_IN, DrawnValues(model.network, 0), micro_batches=1, rows=1, precision="fp32"
    )
    return [buffer.device.type for buffer in (divided.model.image_mean, divided.model.image_std)]


@pytest.mark.prove
def test_a_divided_model_of_images_has_their_mean_on_the_device(tmp_path: Path) -> None:
    assert on_ranks(2, divided_images, tmp_path) == [[STAND_IN.type] * 2] * 2


@pytest.mark.parametrize("how", ["to", "copy_", "tensor", "index", "cpu"])
def test_copies_are_found(how: str) -> None:
    host, device = torch.zeros(3), torch.zeros(3, device=STAND_IN)
    ways = {
        "to": lambda: host.to(STAND_IN),
        "copy_": lambda: device.copy_(host),
        "tensor": lambda: torch.tensor(1.0, device=STAND_IN),
        "index": lambda: device[host.long()],
        "cpu": lambda: device.cpu(),
    }
    with pytest.raises((AssertionError, NotImplementedError), match=r"makes the host wait|no data"), NoWaits():
        ways[how]()


def test_numbers_that_go_with_a_kernel_are_no_copies() -> None:
    number, device = torch.ones(()), torch.zeros(3, device=STAND_IN)
    with NoWaits():
        (device * number).fill_(2.0).add_(torch.full((), 3.0, device=STAND_IN))


def test_batches_come_from_pinned_memory_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, empty, copy = Cuda(monkeypatch), torch.empty, Tensor.copy_
    pinned: list[int] = []

    def noted_empty(size: tuple[int, int], *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        made = empty(size, dtype=dtype)
        pinned.extend([made.data_ptr()] * pin_memory)
        return made

    def noted_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        how = "pinned" if source.data_ptr() in pinned and non_blocking else "pageable"
        cuda.asked.append(f"{how} copy of {len(source)} rows")
        return copy(target, source)

    monkeypatch.setattr(torch, "empty", noted_empty)
    monkeypatch.setattr(Tensor, "copy_", noted_copy)
    signature = KINDS["regression"][1]
    buffer = DeviceBuffer(1, 4, signature, torch.device("cpu"))
    buffer.send(1)
    assert cuda.taken() == [
        "on stream 1:",
        "stream 1 after work of current stream",
        "pinned copy of 4 rows",
        "event 1 on stream 1",
        "host waits for event 1",
    ]
