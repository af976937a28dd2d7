"""A checkpoint of one layout is resumed under every other: weights, moments, and the steps after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.layout_runs import Case, Outcome, divided

SAVED_AT, STEPS = 4, 9
LAYOUTS = {
    "weights 2": Case(2, {"shard": "weights"}),
    "weights 3": Case(3, {"shard": "weights"}),
    "hybrid 4": Case(4, {"shard": "weights", "replicas": 2}),
    "tensor 2": Case(2, {"tensor": 2}),
    "weights 2 x tensor 2": Case(4, {"shard": "weights", "tensor": 2}),
    "1f1b 2": Case(2, {"pipeline": 2}),
    "interleaved 2": Case(2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, accumulation=4),
    "2 x 2 x 2": Case(8, {"pipeline": 2, "shard": "weights", "tensor": 2}),
}
QUICK = [("1f1b 2", "tensor 2")]
TIED = {"tie_word_embeddings": True}


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def check(saved: Outcome, resumed: list[Outcome], same: bool) -> None:
    for outcome in resumed:
        assert saved.restored and equal(outcome.restored, saved.restored)
        assert len(outcome.losses) == STEPS - SAVED_AT
        assert outcome.losses == pytest.approx(saved.losses[SAVED_AT:], abs=0 if same else 1e-12)
        for name, tensor in saved.weights.items():
            assert (outcome.weights[name] - tensor).abs().max() <= (0 if same else 1e-12), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> object:
    @cache
    def train(name: str) -> tuple[Outcome, str]:
        place = tmp_path_factory.mktemp("saved")
        case = replace(LAYOUTS[name], model=TIED, steps=STEPS, save_at=SAVED_AT, home=str(place / "home"))
        return divided(case, place / "ranks")[0], case.home

    return train


def try_pair(first: str, then: str, saved: object, place: Path) -> None:
    outcome, home = saved(first)  # type: ignore[operator]
    case = replace(LAYOUTS[then], model=TIED, steps=STEPS, home=home, resume=True)
    check(outcome, divided(case, place), same=first == then)


@pytest.mark.parametrize(("first", "then"), QUICK)
def test_a_checkpoint_changes_its_layout(first: str, then: str, saved: object, tmp_path: Path) -> None:
    try_pair(first, then, saved, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("then", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_layout_resumes_every_other(first: str, then: str, saved: object, tmp_path: Path) -> None:
    try_pair(first, then, saved, tmp_path)
