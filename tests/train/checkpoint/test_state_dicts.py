"""State dicts equal those of torch's own functions, so other tools can read a checkpoint."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from slipstream.pipeline.train.checkpoint.state import AppState, split_tensors

Optimizer = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


class Tied(nn.Module):
    """Network with tied weights, a frozen layer, a persistent and a non-persistent buffer, and a layer with the name of
    a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("made_anew", torch.ones(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.output(self.frozen(self.module(self.embedding(tokens))) + self.kept)
        return result


def flat(state: Any) -> tuple[Any, dict[str, tuple[torch.Size, int]]]:
    """The tree, and of each tensor its shape and the memory that it shares."""
    tree, tensors = split_tensors(state)
    return tree, {name: (tensor.shape, tensor.data_ptr()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "sgd", "momentum"],
)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_state_is_what_torch_gives(stepped: bool, optimizer: Optimizer, wrapped: bool) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        network: nn.Module = DistributedDataParallel(Tied()) if wrapped else Tied()
        groups: Any = [[p for p in network.parameters() if p.ndim == d and p.requires_grad] for d in (1, 2)]
        steps = optimizer([{"params": group} for group in groups])
        if stepped:
            network(torch.randint(5, (8,))).square().mean().backward()
            steps.step()
            steps.zero_grad()
        state = AppState(network, steps)
        forget = state.initialize()
        assert bool(steps.state) == bool(get_optimizer_state_dict(network, steps)["state"])
        found = state.state_dict()
        assert flat(found["model"]) == flat(get_model_state_dict(network))
        assert flat(found["optimizer"]) == flat(get_optimizer_state_dict(network, steps))
        held = bool(steps.state)
        forget()
        assert bool(steps.state) == (stepped and held), "an optimiser that has stepped forgets nothing"
    finally:
        dist.destroy_process_group()
