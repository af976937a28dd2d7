"""Memory that the tracker counts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.pipeline.train.memory.tracker import MemoryTracker

WORLD = 4


@pytest.fixture
def one_of_four() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_of_divided_tensors_only_this_process_shard_counts(one_of_four: None) -> None:
    """So an operator's first call, and any call of fused AdamW in torch 2.11, counts like every other."""
    mesh, derive = init_device_mesh("cpu", (WORLD,)), ShardingPropagator._propagate_tensor_meta_non_cached
    settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    tracker = MemoryTracker()
    with FakeTensorMode(), tracker:
        weight, gradient, mean, square = (
            DTensor.from_local(torch.ones(97), mesh, [Shard(0)], run_check=False) for _ in range(4)
        )
        step = DTensor.from_local(torch.ones(()), mesh, run_check=False)
        for _ in range(2):
            torch._fused_adamw_(
                [weight], [gradient], [mean], [square], [], [step], **settings, amsgrad=False, maximize=False
            )
    assert tracker.peak == 4 * 97 * weight.to_local().element_size() + step.to_local().element_size()
    assert ShardingPropagator._propagate_tensor_meta_non_cached is derive
