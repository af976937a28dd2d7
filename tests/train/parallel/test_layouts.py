"""Every layout computes what one process computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.operations.proofs.gpu.layouts import CLIP, LayoutCase, distance, expected
from tests.support.layout_runs import divided

QUICK = {
    "weights 2": LayoutCase(2, {"shard": "weights"}, steps=10),
    "tensor 2": LayoutCase(2, {"tensor": 2}, {"model_type": "qwen3"}, steps=10),
    "1f1b 2, tied": LayoutCase(2, {"pipeline": 2}, {"tie_word_embeddings": True}, steps=10, document_end=10),
    "weights 2 x tensor 2": LayoutCase(4, {"shard": "weights", "tensor": 2}, steps=5),
}
LONG = {
    **{name: replace(case, steps=12) for name, case in QUICK.items()},
    "optimizer 2": LayoutCase(2, {"shard": "optimizer"}),
    "gradients 2": LayoutCase(2, {"shard": "gradients"}),
    "weights 3": LayoutCase(3, {"shard": "weights"}),
    "weights 4, offloaded": LayoutCase(4, {"shard": "weights", "offload": True}),
    "hybrid 4": LayoutCase(4, {"shard": "weights", "replicas": 2}),
    "tensor 2, whole sequence": LayoutCase(2, {"tensor": 2, "sequence": False}, {"model_type": "qwen2"}),
    "tensor 2, biases, tied": LayoutCase(
        2, {"tensor": 2}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "tensor 2, whole sequence, tied": LayoutCase(2, {"tensor": 2, "sequence": False}, {"tie_word_embeddings": True}),
    "1f1b 4": LayoutCase(4, {"pipeline": 4}, accumulation=4),
    "interleaved 2": LayoutCase(2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, accumulation=4),
    "interleaved 2, tied": LayoutCase(
        2,
        {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
        {"tie_word_embeddings": True},
        accumulation=4,
    ),
    "1f1b 2 x weights 2": LayoutCase(4, {"pipeline": 2, "shard": "weights"}),
    "1f1b 2 x optimizer 2": LayoutCase(4, {"pipeline": 2, "shard": "optimizer"}),
    "1f1b 2 x tensor 2": LayoutCase(4, {"pipeline": 2, "tensor": 2}),
    "hybrid 4 x tensor 2": LayoutCase(8, {"shard": "weights", "replicas": 2, "tensor": 2}),
    "tensor 2 x replicas 2": LayoutCase(4, {"tensor": 2}),
    "1f1b 2 x replicas 2": LayoutCase(4, {"pipeline": 2}),
    "1f1b 2 x tensor 2 x replicas 2, tied": LayoutCase(8, {"pipeline": 2, "tensor": 2}, {"tie_word_embeddings": True}),
    "tensor 2, documents": LayoutCase(2, {"tensor": 2}, document_end=10),
    "weights 2, documents": LayoutCase(2, {"shard": "weights"}, document_end=10),
    "interleaved 2, documents": LayoutCase(
        2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, accumulation=4, document_end=10
    ),
    "2 x 2 x 2": LayoutCase(8, {"pipeline": 2, "shard": "weights", "tensor": 2}),
    "2 x 2 x 2, tied, qwen3": LayoutCase(
        8, {"pipeline": 2, "shard": "weights", "tensor": 2}, {"tie_word_embeddings": True, "model_type": "qwen3"}
    ),
}


def check(case: LayoutCase, place: Path) -> None:
    outcomes = divided(case, place)
    one = expected(tuple(case.model.items()), case.steps, case.double, case.document_end)
    assert one.losses[-1] < one.losses[0] and max(one.norms) > CLIP, "it trains, and is clipped"
    for outcome in outcomes:
        assert distance(outcome, case) < 1e-12
        for name, tensor in outcomes[0].weights.items():
            assert torch.equal(outcome.weights[name], tensor), f"{name} differs between ranks"


@pytest.mark.parametrize(
    "name",
    [
        "1f1b 2, tied",
        *(pytest.param(name, marks=pytest.mark.prove) for name in ("weights 2", "tensor 2", "weights 2 x tensor 2")),
    ],
)
def test_a_layout_agrees_with_one_process(name: str, tmp_path: Path) -> None:
    check(QUICK[name], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("name", LONG)
def test_every_layout_agrees_with_one_process(name: str, tmp_path: Path) -> None:
    check(LONG[name], tmp_path)


def check_fp32(case: LayoutCase, place: Path) -> None:
    case = replace(case, double=False)
    one = expected(tuple(case.model.items()), case.steps, case.double, case.document_end)
    for outcome in divided(case, place):
        assert {tensor.dtype for tensor in outcome.weights.values()} == {torch.float32}
        assert outcome.losses == pytest.approx(one.losses, abs=1e-5)


@pytest.mark.prove
def test_a_layout_agrees_in_fp32(tmp_path: Path) -> None:
    check_fp32(QUICK["weights 2 x tensor 2"], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("name", LONG)
def test_every_layout_agrees_in_fp32(name: str, tmp_path: Path) -> None:
    check_fp32(LONG[name], tmp_path)


FAULTY = {
    "clip by stage": LayoutCase(2, {"pipeline": 2}, steps=6),
    "lost factor": LayoutCase(2, {"shard": "weights"}, steps=6),
    "tensor gradient not summed": LayoutCase(2, {"tensor": 2}, steps=6),
    "tied gradient not summed": LayoutCase(2, {"pipeline": 2}, {"tie_word_embeddings": True}, steps=6),
}


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTY)
def test_the_comparison_finds_what_is_wrong(fault: str, tmp_path: Path) -> None:
    case = FAULTY[fault]
    assert distance(divided(case, tmp_path / "wrong", fault)[0], case) > 1e-6
    assert distance(divided(case, tmp_path / "right")[0], case) < 1e-12
