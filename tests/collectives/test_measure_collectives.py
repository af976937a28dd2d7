"""Workflow and task that only measure the interconnect, in a real Elastic process group on this machine."""

import json
import re
from pathlib import Path

import pytest
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from slipstream.flyte.stage import local_path
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.worker import WorkerProcess
from slipstream.shared.distributed import fork_server
from slipstream.shared.interconnect.profile import read_profile
from slipstream.shared.profiles.profile import current_profile
from tests.support import REPOSITORY
from tests.support.command_line import invoke
from tests.support.quick_config import NETWORK

#: It compares times.
pytestmark = pytest.mark.alone


@pytest.mark.prove
def test_its_result_is_a_table_to_read_and_a_page(tmp_path: Path) -> None:
    workflow = REPOSITORY / "workflows/collectives.py"
    ended = invoke(pyflyte, tmp_path, ["run", str(workflow), "benchmark", "--config", json.dumps(NETWORK)], {})
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.splitlines()
    assert any("2 processes, gloo, torch " in line for line in lines)
    assert [re.split(r"\s+", line)[1] for line in lines if re.match(r" +\d+ +\d+ +float32", line)] == [
        *("1024", "4096")
    ]
    (page,) = tmp_path.glob("runs/*/network.html")
    assert "<svg" in page.read_text() and f"Report      runs/{page.parent.name}/network.html" in ended.stdout


def test_on_one_machine_a_young_profile_is_reused_without_starting_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.collectives import benchmark_collectives

    monkeypatch.chdir(tmp_path)
    config = CollectivesConfig.from_dict(NETWORK)
    made = benchmark_collectives(config=config)
    profile = read_profile(local_path(made.artifact))
    assert profile.fingerprint.world == current_profile().placement("collectives").world_size
    assert [(m.operation, m.bytes) for m in profile.of("all_reduce")] == [("all_reduce", 1024), ("all_reduce", 4096)]
    assert not made.run.reused

    monkeypatch.setattr(WorkerProcess, "__init__", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr(fork_server, "start_fork_server", lambda _: pytest.fail("a fork server was started"))
    again = benchmark_collectives(config=config)
    assert again.run.reused and read_profile(local_path(again.artifact)) == profile


@pytest.mark.prove
def test_on_the_profile_local_the_main_job_measures_little_unless_told_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.collectives import benchmark_collectives

    monkeypatch.chdir(tmp_path)
    left_open, told = CollectivesConfig(history="a"), CollectivesConfig.from_dict({**NETWORK, "history": "b"})
    assert left_open.is_default and not told.is_default
    short, long = (
        read_profile(local_path(benchmark_collectives(config=config).artifact)) for config in (left_open, told)
    )
    assert short.short and {m.operation for m in short.measurements} == set(left_open.short.operations)
    assert short.of("all_reduce")[-1].bytes == left_open.largest and short.launches == left_open.launches
    assert not long.short and long.settings == told.measuring
