"""Initial weights are drawn once no checkpoint could be restored, every rank its part."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER, write_tokens
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.models import initial
from slipstream.shared.models.config import ModelConfig
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few
from tests.support.training import rank_body, started, trained

MODEL = ModelConfig("transformer", SMALL_TRANSFORMER)
FSDP = ParallelConfig(shard="weights")


def stop(evaluations: Sequence[object]) -> bool:
    return len(evaluations) == 3  # the second checkpoint has waited for the first


def body_without_draws(rank: int, *arguments: Any) -> None:
    drawn = vars(initial.drawn)
    drawn["draw_slice"] = drawn["normal_sequence"] = Mock(side_effect=AssertionError("weights are drawn"))
    rank_body(rank, *arguments)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        pytest.param(2, {"ema": 0.9}, marks=pytest.mark.prove),
        pytest.param(2, {"parallel": FSDP}, marks=pytest.mark.prove),
        pytest.param(2, {"parallel": ParallelConfig(pipeline=2), "accumulation": 2}, marks=pytest.mark.prove),
    ],
)
def test_a_resumed_training_draws_no_weights(world: int, settings: dict[str, Any], tmp_path: Path) -> None:
    prepared = write_tokens(tmp_path / "tokens", 64)
    training = TrainingConfig(epochs=2, batch_size=8, evaluate_every=4, checkpoint_every=4, **settings)
    whole = trained(prepared, tmp_path / "whole", world, training, MODEL)
    for process in started(prepared, tmp_path / "cut", world, training, MODEL, told=stop):
        process.join(120)
        assert process.exitcode, "it was stopped after an evaluation"
    resumed = trained(prepared, tmp_path / "cut", world, training, MODEL, body=body_without_draws)
    assert "training resumes from step" in (tmp_path / "cut/model.log0").read_text()
    for file in ("best.safetensors", "last.safetensors"):
        ours, theirs = load_file(resumed / file), load_file(whole / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Numbered:
    """Values that are their positions in the parameter, and the number of those that were asked for."""

    def __init__(self) -> None:
        self.filled = 0

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        width = torch.Size(size[1:]).numel()
        first = offsets[0] * width if offsets else 0
        part.copy_(torch.arange(first, first + part.numel()).view(part.shape) + len(name))
        self.filled += part.numel()


class Odd(nn.Module):
    """Parameters of fewer rows than ranks, of rows that ranks do not divide, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few, self.one = (nn.Parameter(torch.zeros(size)) for size in ((7, 2), (2, 5), ()))


def filled(frozen: bool) -> tuple[int, dict[str, Tensor]]:
    import torch.distributed as dist

    from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
    from slipstream.shared.models.factory import Predictor

    model = Predictor(Mock(image_mean=[0.0], image_std=[1.0], target_std=1.0, target_mean=0.0), Odd())
    model.adapted = frozen
    replica, values = ReplicatedModel(model, ddp=Mock() if dist.get_world_size() > 1 else None), Numbered()
    replica.fill(values, own=not frozen)
    replica.share_filled(own=not frozen)
    replica.fill(Mock(fill=Mock(side_effect=AssertionError("filled twice"))), own=frozen)
    return values.filled, {name: p.detach() for name, p in model.network.named_parameters()}


@pytest.mark.parametrize("frozen", first_few([False, True], 1))
def test_replicas_draw_parts_and_get_the_whole(frozen: bool, tmp_path: Path) -> None:
    ((_, expected),) = on_ranks(1, partial(filled, frozen), tmp_path / "1")
    assert expected["many"].flatten().tolist() == [4.0 + place for place in range(14)]
    ranks = on_ranks(3, partial(filled, frozen), tmp_path / "3")
    for number, weights in ranks:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert number <= 14
    assert sum(number for number, _ in ranks) == 14 + 10 + 1
