"""Kills through real torchrun: its agent, its restarts, its interpreters."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import TrainingJob, result_digests
from tests.support.fault_schedule import newest
from tests.support.processes import running, torchrun, workers_of

CONFIG = {
    "model": {"name": "mlp", "arguments": {"hidden": [48, 32], "dropout": 0.2}},
    "training": {"epochs": 300, "batch_size": 75, "checkpoint_every": 5, "evaluate_every": 50, "patience": 0},
}
#: Steps of a run: 300 epochs of 8. The last are left alone: a busy machine may notice a checkpoint late.
STEPS = 2400
LEFT_ALONE = 1200


def start(job: TrainingJob, restarts: int) -> subprocess.Popen[bytes]:
    return torchrun(job.prepared, job.output, CONFIG, restarts, job.world)


def published(home: Path) -> int:
    with contextlib.suppress(IndexError):
        return int(newest(home).name[5:17])
    return 0


def wait_for_step(job: TrainingJob, agent: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + 90
    while published(Path(job.home)) < step:
        assert agent.poll() is None, f"the run ended before step {step}; see {job.place}/log"
        assert time.monotonic() < end, f"step {step} was not reached; see {job.place}/log"
        time.sleep(0.005)


def wait_for_workers(job: TrainingJob, agent: subprocess.Popen[bytes]) -> list[int]:
    """The agent's ranks; it may just be starting them, when what it goes on from is as far as it was to come."""
    end = time.monotonic() + 60
    while not (workers := workers_of(agent.pid)):
        assert agent.poll() is None and time.monotonic() < end, f"the workers were not found; see {job.place}/log"
        time.sleep(0.005)
    return workers


def faults_of(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Whom to kill, and after which step's checkpoint."""
    draw = random.Random(seed)
    for step in sorted(draw.sample(range(5, STEPS - LEFT_ALONE, 5), count)):
        yield draw.choice(["worker", "workers", "agent", "SIGTERM agent"]), step


def disturbed(job: TrainingJob, seed: int, count: int) -> int:
    """Run to the end, killing on the way; how often something was killed."""
    agent, done = start(job, count), 0
    for whom, step in faults_of(seed, count):
        wait_for_step(job, agent, step)
        workers = wait_for_workers(job, agent)
        if whom == "worker":
            os.kill(workers[-1], signal.SIGKILL)
        elif whom == "workers":
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
        else:
            os.kill(agent.pid, signal.SIGTERM if whom == "SIGTERM agent" else signal.SIGKILL)
            assert agent.wait(60) != 0
            end = time.monotonic() + 10
            while any(running(worker) for worker in workers):
                assert time.monotonic() < end, "a worker outlived its agent"
                time.sleep(0.01)
            agent = start(job, count)
        done += 1
    assert agent.wait(240) == 0, f"see {job.place}/log"
    return done


@pytest.fixture(scope="module")
def expected(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    job = job_of(prepared, tmp_path_factory.mktemp("expected"))
    assert start(job, 0).wait(240) == 0, (job.place / "log").read_text()[-3000:]
    return result_digests(job)


def job_of(prepared: Path, place: Path) -> TrainingJob:
    return TrainingJob(prepared, place, 2, str(place / "model.checkpoints"))


#: Runs an agent that is killed while its worker imports torch; prints the signal that ended the worker. A subreaper
#: (36 in <linux/prctl.h>) gets the exit status of its grandchildren.
KILLED_AGENT = """
import ctypes, os, subprocess, sys
assert not ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
agent = os.fork()
if not agent:
    worker = subprocess.Popen([sys.executable, "-v", "-m", "slipstream", *sys.argv[1:]], stderr=subprocess.PIPE)
    for line in worker.stderr:
        if b"torch._C" in line:
            os.kill(os.getpid(), 9)
os.waitpid(agent, 0)
print(os.WTERMSIG(os.wait()[1]))
"""


def test_a_worker_that_is_still_starting_ends_with_its_agent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AGENT, "train", str(tmp_path / "none"), str(tmp_path / "model")]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert int(ended.stdout) == signal.SIGKILL


@pytest.mark.prove
def test_killed_under_torchrun_it_ends_the_same(prepared: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    job = job_of(prepared, tmp_path)
    agent = start(job, 1)
    wait_for_step(job, agent, 20)
    os.kill(workers_of(agent.pid)[0], signal.SIGKILL)
    wait_for_step(job, agent, 60)
    workers = workers_of(agent.pid)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    end = time.monotonic() + 10
    while any(running(worker) for worker in workers):
        assert time.monotonic() < end, "a worker outlived its agent"
    assert start(job, 0).wait(240) == 0
    assert result_digests(job) == expected
    # A fault between the end of the training and that of its processes.
    assert start(job, 0).wait(240) == 0
    assert result_digests(job) == expected


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(5))
def test_any_number_of_faults_under_torchrun(
    seed: int, prepared: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    job = job_of(prepared, tmp_path)
    assert disturbed(job, seed, count=6) == 6
    assert result_digests(job) == expected
