"""Traced memory of a step against the real memory of its processes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.memory.processes import TraceFailure, trace_footprints
from slipstream.pipeline.train.memory.trace import TracedStep
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import LoraConfig, ModelConfig
from tests.support.bases import make_base
from tests.support.footprints import real
from tests.support.wording import same_wording

LENGTH = 256
TOKENS = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=512)
TRANSFORMER = ModelConfig(
    "transformer",
    {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
)
TABLE = Signature(
    (TensorSpec("numeric", "float32", (50,)), TensorSpec("categorical", "int32", (2,))),
    "classification",
    "y",
    ("a", "b"),
    cardinalities=(40, 400),
)
MLP = ModelConfig("mlp", {"hidden": [1024, 1024, 512]})
IMAGES = Signature(
    (TensorSpec("image", "uint8", (3, 32, 32)),), "classification", "y", ("a", "b"), (), (9.0,) * 3, (2.0,) * 3
)
RESNET = ModelConfig("resnet", {"widths": [32, 64, 128], "depth": 2})
BOTH: tuple[dict[str, Any], ...] = ({}, {"recompute": "full"})
ALL = (*BOTH, {"precision": "bf16"}, {"precision": "bf16", "recompute": "full"})
#: With these each of the layouts below has both types and both ways, and each pair of these stands in some layout.
ENDS, OTHERS = (ALL[0], ALL[3]), (ALL[1], ALL[2])


def of_tokens(
    world: int, micro_batches: int, parallel: dict[str, Any], more: Sequence[dict[str, Any]]
) -> list[TracedStep]:
    return [
        TracedStep(TRANSFORMER, TOKENS, training(parallel=parallel, **each), micro_batches, 4, world, device="cpu")
        for each in more
    ]


def of_adapters(base: Path, world: int, parallel: dict[str, Any], more: Sequence[dict[str, Any]]) -> list[TracedStep]:
    """Trace the same network as a base in four bits with adapters of rank 8."""
    model = ModelConfig(base=str(base), lora=LoraConfig(8), quantise="nf4")
    return [replace(step, model=model) for step in of_tokens(world, 2, parallel, more)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**TRANSFORMER.arguments, "vocab_size": TOKENS.outputs, "max_position_embeddings": LENGTH}
    return make_base(tmp_path_factory.mktemp("base"), **shape)


def training(**changed: Any) -> TrainingConfig:
    return TrainingConfig.from_dict({"precision": "fp32", **changed})


def check(steps: Sequence[TracedStep], place: Path, limit: float, *, onednn: bool = True) -> None:
    """Each rank's peak, and what lasts, is what is traced of it but for the share ``limit``."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    first = steps[0]
    model = first.model
    if model.name == "transformer":
        model = ModelConfig("transformer", small)
    elif model.base:
        model = replace(model, lora=replace(model.lora, rank=1))
    found = real(steps, replace(first, model=model, rows=2), place, onednn=onednn)
    ranks = [(step, rank) for step in steps for rank in range(step.world)]
    traced = iter(trace_footprints([step.of_rank(rank) for step, rank in ranks]))
    for step, of_ranks in zip(steps, found, strict=True):
        for rank, one in enumerate(of_ranks):
            ours = next(traced)
            assert not isinstance(ours, TraceFailure), ours.reason
            what = (step.training.parallel, step.training.precision, step.training.recompute, rank, one, ours)
            assert ours.peak == pytest.approx(one.peak, rel=limit), what
            assert sum(ours.lasting.values()) == pytest.approx(one.lasting, rel=limit), what


def test_one_process(tmp_path: Path) -> None:
    """A table in fp32, as a CPU emulates bf16."""
    check([TracedStep(MLP, TABLE, training(), 2, 512, 1, device="cpu")], tmp_path, 0.02)


@pytest.mark.prove
def test_momentum_of_sgd(tmp_path: Path) -> None:
    sgd = training(optimizer="sgd", learning_rate=0.1)
    check([TracedStep(MLP, TABLE, sgd, 2, 512, 1, device="cpu")], tmp_path, 0.02)


@pytest.mark.prove
def test_adapters_beside_four_bits(base: Path, tmp_path: Path) -> None:
    check(of_adapters(base, 1, {}, BOTH), tmp_path / "one", 0.02)
    check(of_adapters(base, 2, {}, BOTH), tmp_path / "two", 0.02)
    check(of_adapters(base, 2, {"shard": "weights"}, BOTH), tmp_path / "sharded", 0.1)


@pytest.mark.prove
def test_replicas(tmp_path: Path) -> None:
    check(of_tokens(2, 2, {}, [{}]), tmp_path, 0.02)


@pytest.mark.prove
def test_sharded_weights(tmp_path: Path) -> None:
    check(of_tokens(2, 2, {"shard": "weights"}, [{}]), tmp_path, 0.03)


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2])
def test_transformers_without_a_layout(tmp_path: Path, world: int) -> None:
    check(of_tokens(world, 2, {}, [*ALL, {"ema": 0.9}]), tmp_path, 0.02)


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2])
def test_tables(tmp_path: Path, world: int) -> None:
    steps = [TracedStep(MLP, TABLE, training(**each), 2, 512, world, device="cpu") for each in (*ALL, {"ema": 0.9})]
    check(steps, tmp_path, 0.02)


@pytest.mark.prove
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("world", [1, 2])
def test_images(tmp_path: Path, world: int, norm: str) -> None:
    """In fp32: the kernels of convolutions in bf16 take memory on a CPU that no operation shows."""
    model = ModelConfig("resnet", {**RESNET.arguments, "norm": norm})
    steps = [TracedStep(model, IMAGES, training(**each), 2, 32, world, device="cpu") for each in BOTH]
    check(steps, tmp_path, 0.02, onednn=False)


@pytest.mark.prove
def test_gradients_beside_their_buckets(tmp_path: Path) -> None:
    apart = {"gradients": {"gradient_as_bucket_view": False}}
    check(of_tokens(2, 2, {}, [apart]), tmp_path, 0.02)


@pytest.mark.prove
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "weights"])
def test_shards(tmp_path: Path, shard: str) -> None:
    check(of_tokens(2, 3, {"shard": shard}, OTHERS), tmp_path, 0.03)


@pytest.mark.prove
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"tensor": 2, "sequence": False}])
def test_tensors(tmp_path: Path, parallel: dict[str, Any]) -> None:
    check(of_tokens(2, 2, parallel, ENDS), tmp_path, 0.03)


@pytest.mark.prove
def test_shards_of_tensors(tmp_path: Path) -> None:
    check(of_tokens(4, 2, {"shard": "weights", "tensor": 2}, OTHERS), tmp_path, 0.03)


@pytest.mark.prove
@pytest.mark.parametrize(
    "parallel", [{"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}]
)
def test_pipelines(tmp_path: Path, parallel: dict[str, Any]) -> None:
    check(of_tokens(2, 4, parallel, ENDS), tmp_path, 0.02)


def test_what_cannot_be_traced_is_said() -> None:
    offload = training(parallel={"shard": "weights", "offload": True})
    (found,) = trace_footprints([TracedStep(TRANSFORMER, TOKENS, offload, 1, 4, 2)])
    assert isinstance(found, TraceFailure) and found.reason.startswith("training.parallel.offload:")
    same_wording(found.reason)
