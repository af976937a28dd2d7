"""The benchmark as a Flyte task: a real Elastic process group on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.artifacts.network_figures import read_profile
from tasks.collectives.config import CollectivesConfig
from tasks.collectives.table import table
from tasks.flyte.stage import local_path
from tasks.hardware.profile import current_profile


def test_the_task_measures_the_world_of_its_profile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.collectives.task import benchmark_collectives

    monkeypatch.chdir(tmp_path)
    config = CollectivesConfig(operations=["broadcast"], smallest=1024, largest=4096, budget=0.01)
    made = benchmark_collectives(config=config)
    profile = read_profile(local_path(made.artifact))
    assert profile["world"] == current_profile().placement("collectives").world_size
    assert [(m["operation"], m["bytes"]) for m in profile["measurements"]] == [("broadcast", 1024), ("broadcast", 4096)]
    assert profile["summary"] == {"all_reduce_latency_us": None, "all_reduce_busbw_gbps": None}
    assert len(table(profile).splitlines()) == 2 + 2
    assert not made.run.reused

    again = benchmark_collectives(config=config)
    assert again.run.reused
    assert read_profile(local_path(again.artifact)) == profile
