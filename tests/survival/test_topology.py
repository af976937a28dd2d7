"""A run that goes on with another number of processes sees the same samples in the same order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.survival.world import Fault, Job, attempt


def losses(job: Job) -> dict[int, float]:
    history = json.loads((job.output / "history.json").read_bytes())
    return {point["step"]: point["loss"] for point in history["steps"]}


def rows_seen(job: Job, worlds: list[int]) -> dict[int, list[int]]:
    """The global batch of every step that counts: of each step, the rows of the last attempt that took it."""
    seen: dict[int, list[int]] = {}
    for number, world in enumerate(worlds, start=1):
        parts = [(job.place / f"rows-{number}-{rank}").read_text().splitlines() for rank in range(world)]
        for lines in zip(*parts, strict=False):
            step, shares = json.loads(lines[0])[0], [json.loads(line)[1] for line in lines]
            assert all(json.loads(line)[0] == step for line in lines)
            seen[step] = [row for share in shares for row in share]
    return seen


@pytest.mark.parametrize("worlds", [[2, 1, 3, 4]], ids=lambda worlds: "-".join(map(str, worlds)))
def test_the_same_samples_in_the_same_order(
    worlds: list[int], prepared: Path, tmp_path: Path, undisturbed: Callable[[int], dict[str, str]]
) -> None:
    steps = 48
    whole = Job(prepared, tmp_path / "whole", 2, str(tmp_path / "whole/home"), steps=steps, dropout=0.0)
    assert attempt(dataclasses.replace(whole, watched=1)).finished
    moved = Job(prepared, tmp_path / "moved", 2, str(tmp_path / "moved/home"), steps=steps, dropout=0.0)
    for number, world in enumerate(worlds, start=1):
        now = dataclasses.replace(moved, world=world, watched=number, accumulation=number)
        last = number == len(worlds)
        ended = attempt(now, None if last else Fault("step", rank=0, at=14))
        assert ended.finished == last and ended.fired == (0 if last else 1)
    expected = rows_seen(whole, [2])
    assert rows_seen(moved, worlds) == expected
    assert sorted(expected) == list(range(steps))
    # Plain layers and no dropout: the numbers differ by the order of their sums alone.
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-4)
