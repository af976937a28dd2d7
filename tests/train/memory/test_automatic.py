"""``training.accumulation: auto``: the fewest micro-batches that fit, found once, written into the home and kept."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.models.config import ModelConfig
from slipstream.train.config import TrainingConfig
from slipstream.train.memory import automatic
from slipstream.train.memory.automatic import DECISION, distinct, fewest_that_fit, kept
from slipstream.train.memory.choices import Job, Traced
from slipstream.train.memory.command import rows_of_tokens
from slipstream.train.memory.trace import Footprint
from slipstream.train.memory.tracker import KINDS
from tests.support.tokens import LENGTH, SIZES, token_data
from tests.support.training import log, rank_body, refusal, trained

MODEL = ModelConfig("transformer", {**SIZES, "vocab_size": 48})
AUTO = TrainingConfig(accumulation="auto", batch_size=24, epochs=1, checkpoint_every=8)
SPACIOUS, NARROW, TOO_LITTLE = 2**30, 800_000, 2**16
#: Bytes that a device has, for the ranks of these tests.
MEMORY = "memory_of_tests"


def job(**changed: Any) -> Job:
    return Job(MODEL, rows_of_tokens(MODEL, LENGTH), replace(AUTO, **changed), 1)


def body(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    memory = int(environment.pop(MEMORY))
    automatic.device_memory = lambda group: memory
    # Ranks of tests are daemons, which may have no children; those of torch's agents are none.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    rank_body(rank, world, port, settings, environment)


def train(data: Path, place: Path, memory: int, world: int = 1) -> Path:
    return trained(data, place, world, AUTO, MODEL, {MEMORY: str(memory)}, body)


def traced_as(peaks: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Traces find these peaks, by the number of micro-batches; returns the numbers that were asked for."""
    asked: list[int] = []

    def trace_all(jobs: list[Job]) -> list[Traced]:
        asked.extend(each.training.micro_batches for each in jobs)
        nothing = dict.fromkeys(KINDS, 0)
        return [
            Traced(each, Footprint({**nothing, "parameters": peaks[each.training.micro_batches]}, nothing))
            for each in jobs
        ]

    monkeypatch.setattr(automatic, "trace_all", trace_all)
    return asked


def test_it_is_the_fewest_that_fit_found_in_few_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = distinct(job())
    assert numbers == [1, 2, 3, 4, 5, 6, 8, 12, 24]
    for fewest in numbers[1:]:
        peaks = {number: 10**9 // number for number in numbers}
        asked = traced_as(peaks, monkeypatch)
        memory = (peaks[fewest] + 10**5) / automatic.USABLE
        assert fewest_that_fit(job(), memory).job.training.micro_batches == fewest
        assert len(asked) <= 5


def test_it_is_one_if_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traced_as({1: 10}, monkeypatch)
    assert fewest_that_fit(job(), 2**30).job.training.micro_batches == 1 and asked == [1]


def test_a_pipeline_has_whole_rounds() -> None:
    training = replace(AUTO, parallel=replace(AUTO.parallel, pipeline=2))
    assert distinct(Job(MODEL, rows_of_tokens(MODEL, LENGTH), training, 2)) == [2, 4, 6, 8, 12, 24]


def test_another_memory_or_layout_is_another_decision() -> None:
    record = {"accumulation": 3, "for": {"processes": 2, "memory": 5}, "peak": 1}
    assert kept(record, {"processes": 2, "memory": 5}) == 3
    for other in (record, {}, {"accumulation": "3", "for": {"processes": 2, "memory": 4}}):
        assert kept(other, {"processes": 2, "memory": 4}) == 0


def test_a_training_decides_and_writes_it_into_its_home(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    train(data, tmp_path / "run", NARROW)
    record = json.loads((tmp_path / "run" / "checkpoints" / DECISION).read_text())
    assert 1 < record["accumulation"] < 24 and record["peak"] <= automatic.USABLE * NARROW
    assert f"auto is {record['accumulation']}: a step takes" in log(tmp_path / "run")


@pytest.mark.prove
def test_a_run_that_cannot_fit_is_one_line_with_remedies(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    train(data, tmp_path / "run", TOO_LITTLE)
    message = refusal(tmp_path / "run", 0)
    assert message.startswith("training.accumulation: no number of micro-batches fits: with 24 a step takes ")
    assert ") devices of at least " in message and "\n" not in message


def test_it_is_written_into_the_home_and_read_from_there(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    home = tmp_path / "run" / "checkpoints"
    home.mkdir(parents=True)
    made_for = {"processes": 2, "layout": "none", "recompute": "none", "precision": "fp32", "memory": SPACIOUS}
    (home / DECISION).write_text(json.dumps({"accumulation": 5, "for": made_for, "peak": 1}))
    train(data, tmp_path / "run", SPACIOUS, world=2)
    assert "auto is 5, as it was before" in log(tmp_path / "run")


def test_what_cannot_be_traced_asks_for_a_number() -> None:
    offload = replace(AUTO, parallel=replace(AUTO.parallel, shard="weights", offload=True))
    with pytest.raises(UserError, match=r"training.accumulation: a number expected, as the step cannot be traced: "):
        fewest_that_fit(Job(MODEL, rows_of_tokens(MODEL, LENGTH), offload, 2), 2**30)
