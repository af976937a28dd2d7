"""Recomputed blocks: the same gradients, bit for bit, in less memory."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.config import TrainingConfig, resume_settings
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.parallel.compiled import compile_blocks, recompute_blocks
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.divide import divide_model
from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel, replicate_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.initial.drawn import DrawnValues
from tests.support.allocations import allocated
from tests.support.groups import on_cpu
from tests.support.layout_runs import on_ranks
from tests.support.wording import refuses

LENGTH, ROWS, MICRO_BATCHES = 48, 4, 2
TOKENS = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=64)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DROPPING = ModelConfig("tests.support.nets:Dropping", SIZES)
CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "replicas": (2, {}),
    "weights": (2, {"shard": "weights"}),
    "gradients": (2, {"shard": "gradients"}),
    "tensor": (2, {"tensor": 2}),
    "1f1b": (2, {"pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    "weights x tensor": (4, {"shard": "weights", "tensor": 2}),
}


class Found(NamedTuple):
    """What a rank has after a step's passes: gradients, what its generator draws next, and the most bytes that the
    passes had allocated beyond the weights."""

    gradients: dict[str, Tensor]
    drawn: Tensor
    peak: int


def made(parallel: dict[str, Any], recompute: bool) -> ParallelModel:
    config = ParallelConfig(**parallel)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(DROPPING, TOKENS, 0, empty=config.divides)
    if recompute:
        recompute_blocks(model.network)
    if config.divides:
        layout = Layout.connect(config, rank, world, CPU)
        return divide_model(
            model,
            layout,
            CPU,
            DrawnValues(model.network, 0),
            micro_batches=accumulation(parallel),
            rows=ROWS,
            precision="fp32",
        )
    return replicate_model(model, ModelTraits(), on_cpu(rank, world)) if world > 1 else ReplicatedModel(model)


def accumulation(parallel: dict[str, Any]) -> int:
    return MICRO_BATCHES * parallel.get("stages_per_rank", 1)


def passes(parallel: dict[str, Any], recompute: bool) -> Found:
    torch.manual_seed(0)
    model = made(parallel, recompute)
    rows = ROWS * accumulation(parallel)
    tokens = torch.randint(64, (rows, LENGTH))
    pieces = [slice(start, start + ROWS) for start in range(0, rows, ROWS)]

    def step() -> None:
        model.accumulate((tokens,), pieces, lambda outputs, _: outputs.square().mean())

    step()  # what is made once is made in the first
    for parameter in model.model.parameters():
        parameter.grad = None
    torch.manual_seed(7 + dist.get_rank())
    peak = max(allocated(step))
    gradients = {name: local_tensor(p.grad).clone() for name, p in model.model.named_parameters() if p.grad is not None}
    return Found(gradients, torch.rand(4), peak)


def both(layouts: Sequence[dict[str, Any]]) -> list[list[Found]]:
    return [[passes(parallel, recompute) for recompute in (False, True)] for parallel in layouts]


#: Layouts of as many processes, each tried in one group.
TOGETHER = [
    ("one process",),
    ("weights", "1f1b"),
    *(
        pytest.param(names, marks=pytest.mark.prove)
        for names in (("replicas", "gradients", "tensor", "interleaved"), ("weights x tensor",))
    ),
]


@pytest.fixture(scope="module", params=TOGETHER, ids=", ".join)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Found]]]:
    """By layout, and by rank: what it found without, and with it."""
    layouts = [LAYOUTS[name] for name in request.param]
    work = partial(both, [parallel for _, parallel in layouts])
    of_ranks = on_ranks(layouts[0][0], work, tmp_path_factory.mktemp("ranks"))
    return {name: [of_rank[place] for of_rank in of_ranks] for place, name in enumerate(request.param)}


def test_gradients_are_equal_bit_for_bit_with_dropout(found: dict[str, list[list[Found]]]) -> None:
    for name, of_ranks in found.items():
        for kept, again in of_ranks:
            assert kept.gradients.keys() == again.gradients.keys() and kept.gradients
            for parameter, gradient in kept.gradients.items():
                assert gradient.any(), (name, parameter)
                assert torch.equal(gradient, again.gradients[parameter]), (name, parameter)
            assert torch.equal(kept.drawn, again.drawn), name


def test_a_step_takes_less_beyond_its_state(found: dict[str, list[list[Found]]]) -> None:
    for name, of_ranks in found.items():
        kept, again = (sum(rank[which].peak for rank in of_ranks) for which in (0, 1))
        assert again <= 0.65 * kept, (name, again / kept)


def test_a_batchs_statistics_count_once() -> None:
    shape = TensorSpec("image", "uint8", (3, 8, 8))
    images = Signature((shape,), "classification", "y", ("a", "b"), (), (9.0,) * 3, (2.0,) * 3)
    models: list[Predictor] = [build_model(ModelConfig("resnet", {"norm": "batch"}), images, 0) for _ in range(2)]
    recompute_blocks(models[1].network)
    for model in models:
        model(torch.arange(4 * 3 * 64).view(4, 3, 8, 8).remainder(251).float()).square().sum().backward()
    for (name, one), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name


def test_it_may_be_another_on_resume() -> None:
    """As no number depends on it: neither the key of a home nor the identity of a checkpoint has it."""
    assert resume_settings(TrainingConfig(recompute="full")) == resume_settings(TrainingConfig())


def compiled_passes(recompute: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build_model(DROPPING, TOKENS, 0)
    if recompute:
        recompute_blocks(model.network)
    tokens = torch.randint(64, (ROWS, LENGTH))
    parallel, pieces = ReplicatedModel(model), [slice(0, ROWS)]
    found = compile_blocks(parallel, (tokens,), pieces, nullcontext)
    assert parallel.compiled is found.blocks
    torch.manual_seed(7)
    parallel.accumulate((tokens,), pieces, lambda outputs, _: outputs.square().mean())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_compiled_blocks_are_recomputed_as_they_are(tmp_path: Path) -> None:
    kept, again = (on_ranks(1, partial(compiled_passes, r), tmp_path / str(r))[0] for r in (False, True))
    assert kept.keys() == again.keys() and kept
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_model_without_blocks_is_one_line() -> None:
    with refuses(UserError, match="training.recompute:"):
        recompute_blocks(nn.Sequential(nn.Linear(2, 2)))
