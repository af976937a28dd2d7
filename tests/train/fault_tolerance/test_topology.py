"""A run that resumes with another number of processes sees the same samples in the same order."""

import dataclasses
import json
from pathlib import Path

import pytest
from torch import nn

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, run_attempt
from slipstream.pipeline.train.identity import batch_dependent_layers, describe_changes


def losses(job: TrainingJob) -> dict[int, float]:
    history = json.loads((job.output / "history.json").read_bytes())
    return {point["step"]: point["loss"] for point in history["steps"]}


def rows_seen(job: TrainingJob, worlds: list[int]) -> dict[int, list[int]]:
    """The global batch of every step that counts: of each step, the rows of the last attempt that took it."""
    seen: dict[int, list[int]] = {}
    for number, world in enumerate(worlds, start=1):
        parts = [(job.place / f"rows-{number}-{rank}").read_text().splitlines() for rank in range(world)]
        for lines in zip(*parts, strict=False):
            step, shares = json.loads(lines[0])[0], [json.loads(line)[1] for line in lines]
            assert all(json.loads(line)[0] == step for line in lines)
            seen[step] = [row for share in shares for row in share]
    return seen


WORLDS = [2, 1, 3, 4]


@pytest.mark.prove
@pytest.mark.parametrize("steps", [48, 200])
def test_the_same_samples_in_the_same_order(steps: int, prepared: Path, tmp_path: Path) -> None:
    worlds = WORLDS
    whole = TrainingJob(prepared, tmp_path / "whole", 2, str(tmp_path / "whole/home"), steps=steps, dropout=0.0)
    assert run_attempt(dataclasses.replace(whole, watched=1)).finished
    moved = TrainingJob(prepared, tmp_path / "moved", 2, str(tmp_path / "moved/home"), steps=steps, dropout=0.0)
    for number, world in enumerate(worlds, start=1):
        now = dataclasses.replace(moved, world=world, watched=number, accumulation=number)
        last = number == len(worlds)
        ended = run_attempt(now, *([] if last else [InjectedFault("step", rank=0, at=2 + steps // len(worlds))]))
        assert ended.finished == last and ended.fired == (0 if last else 1)
    expected = rows_seen(whole, [2])
    assert rows_seen(moved, worlds) == expected
    assert sorted(expected) == list(range(steps))
    # Plain layers and no dropout: the numbers differ by the order of their sums alone.
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-4)
    log = (moved.place / "log-0").read_text()
    assert "(processes 3 -> 4, accumulation 3 -> 4): the same samples in the same order, numbers equal up" in log


@pytest.mark.prove
def test_with_dropout_the_run_says_that_the_numbers_differ(prepared: Path, tmp_path: Path) -> None:
    job = TrainingJob(prepared, tmp_path, 2, str(tmp_path / "home"), dropout=0.2)
    assert run_attempt(job, InjectedFault("step", rank=0, at=8)).fired == 1
    assert run_attempt(dataclasses.replace(job, world=1)).finished
    log = (tmp_path / "log-0").read_text()
    assert "not bit for bit (processes 2 -> 1): the same samples in the same order, other numbers (Dropout)" in log


def test_what_depends_on_how_a_batch_is_spread_is_known_and_equal_conditions_say_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0), nn.MultiheadAttention(2, 1, dropout=0.1))
    assert batch_dependent_layers(model) == ["BatchNorm1d", "MultiheadAttention"]
    now = {"processes": 2, "torch": "2.13.0"}
    assert describe_changes(now, now, model) == "" == describe_changes({}, now, model)
    assert "(torch 2.12.0 -> 2.13.0)" in (said := describe_changes({**now, "torch": "2.12.0"}, now, model))
    assert said.endswith("numbers equal up to rounding")
