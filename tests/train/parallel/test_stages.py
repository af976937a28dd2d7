"""The stages of a pipeline, one after the other, are the whole model."""

import pytest
import torch
from torch import Tensor, nn

from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.layout import Layout
from slipstream.pipeline.train.parallel.pipeline import cut_stages
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.plan import ParallelPlan


class Planned(nn.Module):
    """A user's network of four blocks that states a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Flatten()
        self.blocks = nn.ModuleDict({str(number): nn.Linear(16, 16) for number in range(4)})
        self.last: nn.Module = nn.Linear(16, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks.values():
            hidden = hidden + block(hidden).tanh()
        return self.last(hidden)

    def plan(self) -> ParallelPlan:
        names = tuple(f"blocks.{number}" for number in self.blocks)
        return ParallelPlan(names, {}, {}, 1, (16,), self.cut)

    def cut(self, start: int, stop: int) -> None:
        count = len(self.blocks)
        self.blocks = nn.ModuleDict({str(number): self.blocks[str(number)] for number in range(start, stop)})
        self.first = self.first if start == 0 else nn.Identity()
        self.last = self.last if stop == count else nn.Identity()


@pytest.mark.parametrize("stages", [2, 4])
def test_only_the_ends_of_a_pipeline_scale_inputs_and_outputs(stages: int) -> None:
    images = TensorSpec("image", "uint8", (1, 4, 4))
    signature = Signature(
        (images,), "regression", "y", image_mean=(120.0,), image_std=(30.0,), target_mean=50.0, target_std=9.0
    )
    torch.manual_seed(0)
    model = Predictor(signature, Planned())
    inputs = torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8)
    hidden: Tensor = inputs
    for rank in range(stages):
        layout = Layout(ParallelConfig(pipeline=stages), rank, stages, (stages, 1, 1, 1))
        (part,) = cut_stages(model, layout)
        hidden = part(hidden)
    assert torch.equal(hidden, model(inputs))
