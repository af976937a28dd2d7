"""``slipstream collectives``, alone and under torchrun: errors in one line, and output by rank 0 only."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.subcommands import slipstream
from tests.support import REPOSITORY
from tests.support.command_line import Ended, invoke, run_process
from tests.support.fake_nvml import see_four_gpus
from tests.support.proving import first_few

#: It compares times.
pytestmark = pytest.mark.alone

ALONE = [sys.executable, "-m", "slipstream", "collectives"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "slipstream", "collectives"]
SMALL = "{{operations: [all_reduce, barrier], smallest: 1024, largest: 4096, budget: 0.001, {}}}"


def start(directory: Path, command: list[str], settings: str = "launches: 2", *more: str, **environment: str) -> Ended:
    (directory / "run.yaml").write_text(f"collectives: {SMALL.format(settings)}\n")
    words = [*command, "--config", "run.yaml", *more]
    return run_process(words, directory, {"PYTHONPATH": str(REPOSITORY), **environment})


def here(directory: Path, settings: str = "launches: 2", *more: str, **environment: str) -> Ended:
    """:func:`start` alone, in this process."""
    (directory / "run.yaml").write_text(f"collectives: {SMALL.format(settings)}\n")
    return invoke(slipstream, directory, ["collectives", "--config", "run.yaml", *more], environment)


def measured(output: str) -> list[str]:
    """Operation and size of each line of the table."""
    found, operation = [], ""
    for line in output.splitlines():
        if line.startswith("# ") and len(line.split()) == 2:
            operation = line.split()[1]
        elif line.strip()[:1].isdigit():
            found.append(f"{operation} {line.split()[0]}")
    return found


def test_it_starts_its_own_processes_and_keeps_the_profile(tmp_path: Path) -> None:
    ended = here(tmp_path, "launches: 2", "--processes", "4", "--json", "profile.json", "--csv", "profile.csv")
    assert ended.returncode == 0, ended.stdout
    assert "# 4 processes, gloo, torch " in ended.stdout and ", 2 launches" in ended.stdout
    assert measured(ended.stdout) == [f"all_reduce {n}" for n in (1024, 4096)] + ["barrier 0"]
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert len(profile["pairs"]) == 6 and len(profile["overlaps"]) == 1 and len(profile["products"]) == 2
    assert all(len(m["launches"]) == 2 for m in profile["measurements"])
    assert len((tmp_path / "profile.csv").read_text().splitlines()) == 1 + 3 + 6
    (kept,) = (tmp_path / ".slipstream/history").glob("*/*/profile.json")
    assert json.loads(kept.read_text()) == profile


@pytest.mark.prove
def test_under_torchrun_it_is_one_table(tmp_path: Path) -> None:
    """A smaller group, without some of the processes, is measured in the same table."""
    ended = start(tmp_path, TORCHRUN, "launches: 1, worlds: [2, 4]")
    assert ended.returncode == 0, ended.stdout
    assert len(measured(ended.stdout)) == 6 and ended.stdout.count("# 3 processes, gloo") == 1
    assert "# all_reduce between 2 of 3 processes" in ended.stdout
    assert "# skipped: worlds 4: not fewer than all 3" in ended.stdout


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    first_few(
        [
            (
                "dtypes: [int32], reductions: [avg]",
                {},
                "Error: collectives.reductions: all_reduce by avg in int32 cannot",
            ),
            ("", {"GLOO_SOCKET_IFNAME": "nowhere0"}, "Error: rank 0: GLOO_SOCKET_IFNAME=nowhere0: this machine has no"),
            ("history: run.yaml/x", {}, "Error: run.yaml/x/"),
            ("dtypes: [gossip]", {}, "Error: "),
            (
                "",
                {"RANK": "0"},
                "Error: WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and MASTER_PORT: not in the environment",
            ),
        ]
    ),
)
def test_a_mistake_is_one_line(tmp_path: Path, settings: str, environment: dict[str, str], said: str) -> None:
    ended = here(tmp_path, settings, **environment)
    assert ended.returncode == 1
    (line,) = ended.stdout.strip().splitlines()
    assert line.startswith(said)


def test_more_processes_than_gpus_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch, "0")
    ended = here(tmp_path, "launches: 2", "--processes", "3")
    assert ended.returncode == 1
    (line,) = ended.stdout.strip().splitlines()
    assert line.startswith("Error: 3 processes for 1 GPU: each process needs one of its own")


@pytest.mark.prove
def test_of_torchruns_ranks_only_the_first_speaks(tmp_path: Path) -> None:
    ended = start(tmp_path, TORCHRUN, GLOO_SOCKET_IFNAME="nowhere0")
    assert ended.returncode != 0
    assert ended.stdout.count("this machine has no interface 'nowhere0'") == 1, ended.stdout
    # torchrun adds its own account; none of ours is a traceback.
    assert "slipstream/pipeline/collectives" not in ended.stdout


@pytest.mark.prove
def test_a_rank_that_is_killed_is_named_and_nobody_is_left(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("collectives: {budget: 5, largest: 65536, timeout: 5}\n")
    command = [*ALONE, "--config", "run.yaml", "--processes", "3"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    parent, victim, deadline = psutil.Process(process.pid), None, time.monotonic() + 60
    while victim is None and time.monotonic() < deadline:
        time.sleep(0.05)
        # Children of the fork server that have used their processor for a while: they measure.
        found = [child for child in parent.children(recursive=True) if child.ppid() != process.pid]
        victim = next((child for child in found if child.cpu_times().user > 0.3), None)
    assert victim is not None
    victim.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("Error: rank ") and " died (SIGKILL" in last and "during " in last
    assert not psutil.pid_exists(victim.pid) or victim.status() == psutil.STATUS_ZOMBIE


@pytest.mark.prove
def test_one_process_measures_what_still_makes_sense(tmp_path: Path) -> None:
    ended = start(tmp_path, ALONE, "launches: 1", "--processes", "1")
    assert ended.returncode == 0, ended.stdout
    assert len(measured(ended.stdout)) == 3 and "# skipped: pairs: a single process has no link" in ended.stdout
