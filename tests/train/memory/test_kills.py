"""Kills of trainings with recomputed blocks or automatic micro-batches do not change the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.checkpoint.home import DECISION
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.machine.limits import MEMORY
from tests.support.tokens import SIZES, token_data

#: Of two processes; a step with one micro-batch takes more than a part of it, with two or three it does not.
TOO_LITTLE_FOR_ONE = "4050Ki"
FULL = {"recompute": "full"}
FSDP2 = {"parallel": ParallelConfig(shard="weights")}
KILLS = (InjectedFault("step", at=8), InjectedFault("upload", rank=1), InjectedFault("step", rank=1, at=5))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("training", "auto"),
    [(FULL, True), (FULL | FSDP2, False), ({}, True), (FSDP2, True)],
    ids=["recompute and auto", "recompute, FSDP2", "auto", "auto, FSDP2"],
)
def test_it_ends_the_same(training: dict[str, Any], auto: bool, tmp_path: Path) -> None:
    whole = TrainingJob(
        token_data(tmp_path / "data").artifact.directory,
        tmp_path / "whole",
        2,
        str(tmp_path / "whole/home"),
        accumulation="auto" if auto else 2,
        training=training,
        factory="tests.support.nets:Dropping",
        arguments=SIZES,
        environment={MEMORY: TOO_LITTLE_FOR_ONE} if auto else {},
        patience_s=60,  # rank 0 traces
    )
    killed = replace(whole, place=tmp_path / "killed", home=str(tmp_path / "killed/home"))
    assert run_attempt(whole).finished, (whole.place / "log-0").read_text()[-3000:]
    for fault in KILLS:
        ended = run_attempt(killed, fault)
        assert ended.fired and not ended.finished, fault
    assert run_attempt(killed).finished, (killed.place / "log-0").read_text()[-3000:]
    assert result_digests(killed) == result_digests(whole)
    said = (killed.place / "log-0").read_text()
    assert said.count("resumes from step ") == len(KILLS) and "not bit for bit" not in said
    if auto:
        found = json.loads(Path(killed.home, DECISION).read_bytes())
        assert found["accumulation"] > 1 and not found["ran_out"]
        assert said.count("training.accumulation: auto is ") == len(KILLS) + 1
        assert said.count("as it was before") == len(KILLS)
