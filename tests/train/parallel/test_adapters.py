"""Adapters of a model that several processes hold: the gradients are those of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.adapted_runs import SIZES, Case, alone, distance, each_in_turn
from tests.support.bases import make_base
from tests.support.layout_runs import on_ranks

DDP: dict[str, Any] = {}
FSDP = {"shard": "weights"}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [DDP, FSDP, {"shard": "gradients"}, {"shard": "optimizer"}, {"pipeline": 2}],
    3: [DDP, FSDP],
}
QUANTISE = ("none", "nf4")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), "qwen2", **SIZES, tie_word_embeddings=True)


def cases_of(base: Path, world: int) -> list[Case]:
    return [Case(base, quantise, layout) for quantise in QUANTISE for layout in LAYOUTS[world]]


@functools.cache
def expected(base: Path, quantise: str, precision: str = "fp32") -> dict[str, Tensor]:
    return alone(Case(base, quantise, precision=precision))


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(world: int, base: Path, tmp_path: Path) -> None:
    cases = cases_of(base, world)
    outcomes = on_ranks(world, functools.partial(each_in_turn, cases), tmp_path)
    for number, case in enumerate(cases):
        for of_rank in outcomes:
            assert distance(of_rank[number], expected(base, case.quantise)) < 1e-5, case
    assert distance(expected(base, "nf4"), expected(base, "none")) > 1e-3


def test_in_bf16_recomputed_four_bits_stay_four_bits(base: Path, tmp_path: Path) -> None:
    cases = [Case(base, "nf4", layout, precision="bf16", recompute=True) for layout in (DDP, FSDP, {"pipeline": 2})]
    for of_rank in on_ranks(2, functools.partial(each_in_turn, cases), tmp_path):
        for found in of_rank:
            assert all(gradient.dtype is torch.float32 for gradient in found.values())
            assert distance(found, expected(base, "nf4", "bf16")) < 0.05
