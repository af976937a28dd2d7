"""A rank runs out of memory in a step: the next attempt goes on with smaller micro-batches, to the same bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.artifacts.homes import Holder
from slipstream.artifacts.results.ledger import read_attempts
from slipstream.storage import storage_for
from slipstream.train.checkpoint.home import DECISION
from slipstream.train.parallel.config import ParallelConfig
from tests.support.little_memory import LARGE, ROWS, STEPS_PER_EPOCH, large_steps, newest_step, take_memory_away
from tests.support.training import log, started, table_of_numbers, trained

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHARDED = {"parallel": ParallelConfig(shard="weights")}
HOLDER = Holder("a run")
RAN_OUT = "rank 1 ran out of memory at 1 micro-batch: goes on with 2 from the last checkpoint"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "table", STEPS_PER_EPOCH * ROWS)


def digests(place: Path) -> dict[str, str]:
    files = json.loads((place / "model" / "manifest.json").read_bytes())["files"]
    return {name: files[name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")}


def run_out(data: Path, place: Path, settings: Any) -> int:
    """Train until a rank runs out of memory, which is taken away from the other; returns the step of the newest
    checkpoint."""
    ranks = started(data, place, 2, settings, LARGE, ONE_THREAD, holder=HOLDER)
    home = place / "checkpoints"
    take_memory_away(ranks[1].pid or 0, lambda: newest_step(home) >= 1)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [1, 1], log(place)
    assert RAN_OUT in log(place, 1)
    # Rank 0, which writes the ledger, saw but a lost peer.
    assert RAN_OUT not in log(place, 0)
    assert [attempt.ended for attempt in read_attempts(storage_for(str(home)))] == [RAN_OUT]
    return newest_step(home)


@pytest.mark.parametrize("more", [{}, pytest.param(SHARDED, marks=pytest.mark.prove)], ids=["DDP", "FSDP2"])
def test_it_goes_on_with_twice_as_many(more: Mapping[str, Any], data: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "run", tmp_path / "other"
    step = run_out(data, place, large_steps(2, **more))
    other.mkdir()
    shutil.copytree(place / "checkpoints", other / "checkpoints", ignore=shutil.ignore_patterns(DECISION))
    trained(data, place, 2, large_steps(2, **more), LARGE, ONE_THREAD, holder=HOLDER)
    said = log(place)
    assert "training.accumulation: 1 is 2, as it was before: with 1 a rank ran out of memory" in said
    assert f"resumes from step {step} " in said and "not bit for bit (accumulation 1 -> 2)" in said
    # As the user would have done it.
    trained(data, other, 2, large_steps(2, **more, accumulation=2), LARGE, ONE_THREAD, holder=HOLDER)
    assert digests(place) == digests(other)
    ledger = json.loads((place / "model" / "attempt.json").read_bytes())["ledger"]
    assert ledger["ends"] == [RAN_OUT, "finished"]
