"""A checkpoint of any layout resumes under every other: weights, moments, and the steps after it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.operations.proofs.gpu.layouts import LayoutCase, LayoutResult
from tests.support.layout_runs import divided, each_in_turn, on_ranks

SAVED_AT, STEPS = 4, 9
LAYOUTS = {
    "replicas 2": LayoutCase(2, {}),
    "weights 2": LayoutCase(2, {"shard": "weights"}),
    "weights 3": LayoutCase(3, {"shard": "weights"}),
    "hybrid 4": LayoutCase(4, {"shard": "weights", "replicas": 2}),
    "tensor 2": LayoutCase(2, {"tensor": 2}),
    "weights 2 x tensor 2": LayoutCase(4, {"shard": "weights", "tensor": 2}),
    "1f1b 2": LayoutCase(2, {"pipeline": 2}),
    "2 x 2 x 2": LayoutCase(8, {"pipeline": 2, "shard": "weights", "tensor": 2}),
}
INTERLEAVED = LayoutCase(2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, accumulation=4)
QUICK = [("1f1b 2", "tensor 2")]
TIED = {"tie_word_embeddings": True}
Saved = Callable[[str], tuple[LayoutResult, str]]


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def check(saved: LayoutResult, resumed: list[LayoutResult], same: bool) -> None:
    for outcome in resumed:
        assert saved.restored and equal(outcome.restored, saved.restored)
        assert len(outcome.losses) == STEPS - SAVED_AT
        assert outcome.losses == pytest.approx(saved.losses[SAVED_AT:], abs=0 if same else 1e-12)
        for name, tensor in saved.weights.items():
            assert (outcome.weights[name] - tensor).abs().max() <= (0 if same else 1e-12), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def train(case: str) -> tuple[LayoutResult, str]:
        place = tmp_path_factory.mktemp("saved")
        made = replace(layout(case), model=TIED, steps=STEPS, save_at=SAVED_AT, home=str(place / "home"))
        return divided(made, place / "ranks")[0], made.home

    return train


def layout(name: str) -> LayoutCase:
    return INTERLEAVED if name == "interleaved 2" else LAYOUTS[name]


def try_all(then: str, saved: Saved, firsts: Iterable[str], place: Path) -> None:
    """Resume what each of ``firsts`` has saved under the layout ``then``, in one group of processes."""
    found = {first: saved(first) for first in firsts}
    cases = [replace(layout(then), model=TIED, steps=STEPS, home=home, resume=True) for _, home in found.values()]
    by_rank = on_ranks(cases[0].world, partial(each_in_turn, cases), place)
    for number, (first, (outcome, _)) in enumerate(found.items()):
        check(outcome, [rank[number] for rank in by_rank], same=first == then)


@pytest.mark.parametrize(("first", "then"), QUICK)
def test_a_checkpoint_changes_its_layout(first: str, then: str, saved: Saved, tmp_path: Path) -> None:
    try_all(then, saved, [first], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("then", LAYOUTS)
def test_every_layout_resumes_every_other(then: str, saved: Saved, tmp_path: Path) -> None:
    try_all(then, saved, LAYOUTS, tmp_path)


@pytest.mark.prove
def test_an_interleaved_pipeline_resumes_others_and_itself(saved: Saved, tmp_path: Path) -> None:
    try_all("interleaved 2", saved, ["replicas 2", "1f1b 2", "2 x 2 x 2", "interleaved 2"], tmp_path)
