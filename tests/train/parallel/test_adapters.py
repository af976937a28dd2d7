"""Adapters of a model on several processes: gradients of one process, and weights kept in four bits."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.pipeline.train.parallel.divide import JoinedParts
from slipstream.pipeline.train.parallel.pipeline import cut_stage
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.factory import build_model
from tests.support.adapted_runs import SIGNATURE, SIZES, Case, Held, alone, distance, each_in_turn, kept_between_passes
from tests.support.bases import make_base
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few, pairwise

DDP: dict[str, Any] = {}
FSDP = {"shard": "weights"}
PIPELINE = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
#: As FSDP2 gathers weights, and autocast computes.
ROUGH: dict[str, Any] = {"precision": "bf16", "recompute": True}
#: Of quantise, layout and what else.
Short = tuple[Held, dict[str, Any], dict[str, Any]]
QUICK: list[Short] = [("none", INTERLEAVED, {}), ("nf4", FSDP, ROUGH)]
ALL: dict[int, list[Short]] = {
    2: [
        *pairwise(
            ("none", "nf4"),
            (DDP, FSDP, {"shard": "gradients"}, {"shard": "optimizer"}, PIPELINE, INTERLEAVED),
            ({}, ROUGH, {"recompute": True}),
        )
    ],
    3: [(quantise, layout, {}) for quantise in ("none", "nf4") for layout in (DDP, FSDP)],
    4: [
        ("nf4", {**PIPELINE, **FSDP}, {}),
        ("nf4", {**FSDP, "replicas": 2}, {}),
        ("nf4", {**FSDP, "offload": True}, ROUGH),
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), "qwen2", **SIZES, tie_word_embeddings=True)


@functools.cache
def expected(base: Path, quantise: Held, precision: str = "fp32") -> dict[str, Tensor]:
    return alone(Case(base, quantise, precision=precision))


@pytest.mark.parametrize(
    ("world", "cases"), [(2, QUICK), *(pytest.param(world, ALL[world], marks=pytest.mark.prove) for world in ALL)]
)
def test_gradients_are_those_of_one_process(world: int, cases: list[Short], base: Path, tmp_path: Path) -> None:
    run = [Case(base, quantise, layout, accumulation=4, **more) for quantise, layout, more in cases]
    for of_rank in on_ranks(world, functools.partial(each_in_turn, run), tmp_path):
        for case, found in zip(run, of_rank, strict=True):
            assert all(gradient.dtype is torch.float32 for gradient in found.values())
            limit = 1e-5 if case.precision == "fp32" else 0.05
            assert distance(found, expected(base, case.quantise, case.precision)) < limit, case
    assert distance(expected(base, "nf4"), expected(base, "none")) > 1e-3


@pytest.mark.parametrize("quantise", first_few(["none", "nf4"], 1))
def test_that_frozen_weights_are_held_in_bf16_changes_nothing_in_bf16(quantise: Held, base: Path) -> None:
    held, not_held = (alone(Case(base, quantise, precision="bf16", held=each)) for each in (True, False))
    assert held.keys() == not_held.keys() and all(torch.equal(held[name], not_held[name]) for name in held)
    assert held != {} and distance(held, expected(base, quantise)) > 1e-4


@pytest.mark.prove
def test_between_passes_fsdp_holds_neither_what_it_gathered_nor_what_was_dequantised(
    base: Path, tmp_path: Path
) -> None:
    for kept in on_ranks(2, functools.partial(kept_between_passes, Case(base, "nf4", FSDP)), tmp_path):
        # Of each of the 28 layers but the first three, whose inputs need no gradient.
        assert kept.parts == 2 * 25 and kept.bytes_of_parts == 0
        assert not kept.dequantised


def test_stages_that_a_process_holds_know_that_they_are_adapted(base: Path) -> None:
    model = Case(base).model
    stages = [cut_stage(build_model(model, SIGNATURE, 0, empty=True), stage, 2) for stage in range(2)]
    joined, whole = JoinedParts(stages), build_model(model, SIGNATURE, 0, empty=True)
    assert joined.own_state().keys() == whole.own_state().keys() and all(map(is_adapter, joined.own_state()))
    assert joined.state_dict().keys() == whole.state_dict().keys()
