"""The trained weights of a divided model come to rank 0 one at a time."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from slipstream.operations.proofs.gpu.layouts import SEED, SIZES, LayoutCase, model_of
from slipstream.shared.models.initial.drawn import DrawnValues
from tests.support.layout_runs import on_ranks


def taken(parallel: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors that this rank gets, and the most of them, its own parts apart, that were alive at once."""
    import torch.distributed as dist

    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout
    from slipstream.shared.models.trained import in_file_order

    device = torch.device("cpu")
    layout = Layout.connect(ParallelConfig(**parallel), dist.get_rank(), dist.get_world_size(), device)
    case = LayoutCase(layout.world, parallel, {"tie_word_embeddings": True})
    undivided = model_of(case, empty=True)
    values = DrawnValues(undivided.network, SEED)
    model = divide_model(undivided, layout, device, values, micro_batches=2, rows=2, precision="fp32")
    parts = model.model.state_dict()
    own = {id(part) for part in parts.values()}
    weights = model.whole(parts)
    refs: list[weakref.ref[torch.Tensor]] = []
    found, most = [], 0
    for tensor in weights.tensors():
        if id(tensor) not in own:
            refs.append(weakref.ref(tensor))
        found.append(tensor.numpy().copy())
        del tensor
        gc.collect()
        most = max(most, sum(ref() is not None for ref in refs))
    names = in_file_order(weights.kinds) if dist.get_rank() == 0 else []
    return dict(zip(names, map(torch.from_numpy, found), strict=True)), most


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"pipeline": 2}),
        pytest.param(4, {"shard": "weights", "tensor": 2}, marks=pytest.mark.prove),
        pytest.param(8, {"pipeline": 2, "shard": "weights", "tensor": 2}, marks=pytest.mark.prove),
    ],
)
def test_rank_0_gets_one_whole_tensor_after_the_other(world: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    from slipstream.pipeline.train.parallel.divide import fill_part

    (mine, most), *others = on_ranks(world, partial(taken, parallel), tmp_path)
    assert most == 1 and all(got == ({}, 0) for got in others)
    expected = model_of(LayoutCase(1, {}, {"tie_word_embeddings": True}), empty=True)
    fill_part(expected, torch.device("cpu"), DrawnValues(expected.network, SEED))
    state = expected.state_dict()
    assert mine.keys() == state.keys() and len(state) > SIZES["num_hidden_layers"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in mine.items())


def waited_for() -> list[int]:
    """How many tensors each of rank 1's waits was for, while both ranks take all."""
    import torch.distributed as dist

    from slipstream.pipeline.train.parallel import divide

    waits: list[int] = []
    vars(divide)["wait_until_computed"] = lambda whole: waits.append(whole.numel())
    found, _ = taken({"shard": "weights"})
    return waits if dist.get_rank() else [tensor.numel() for tensor in found.values()]


@pytest.mark.prove
def test_no_rank_begins_a_tensor_before_rank_0_has_written_the_one_before(tmp_path: Path) -> None:
    sizes, waits = on_ranks(2, waited_for, tmp_path)
    assert waits == sizes and sizes


def test_a_gpu_is_waited_for_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.pipeline.train.parallel.divide import wait_until_computed

    stream, event = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device == "the tensor's" else None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    wait_until_computed(Mock(is_cuda=True, device="the tensor's"))
    assert event.mock_calls == [call.record(stream), call.synchronize()]
