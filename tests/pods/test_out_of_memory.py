"""Pods whose memory is really small: whichever process the kernel kills, the failure has one name and is final."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.flyte.memory_notes import MemoryNote
from slipstream.operations.proofs.rehearsal.operator import demystified
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome
from slipstream.operations.proofs.rehearsal.pods import OOM_KILLED, PodProcess
from tests.support.control_groups import memory_group, put
from tests.support.job_pods import run_job
from tests.support.training_pods import Cluster, pods_of_job, python_path

LIMIT = 1200 << 20
#: In the third step one rank takes more than its pod has.
HUNGRY = """
import os
from slipstream.pipeline.train.loop import step
real, steps = step.train_step, []
def train_step(*arguments):
    steps.append(1)
    if os.environ["RANK"] == "{rank}" and len(steps) == 3:
        steps.append(b"x" * (4 << 30))
    return real(*arguments)
step.train_step = train_step
"""
LINE = re.compile(
    r"train: out of memory: the kernel killed 1 process at the limit of 1\.17 GiB \(peak 1\.17 GiB\); "
    r"raise stages\.train\.memory in the profile '\S+'"
)


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """One for each pod."""
    with ExitStack() as stack:
        yield [stack.enter_context(memory_group(LIMIT)) for _ in range(2)]


@pytest.mark.prove
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_a_job(rank: int, cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    name, variables = f"hungry-{rank}", python_path(tmp_path, HUNGRY.format(rank=rank))
    pods = pods_of_job(cluster, name, processes=2, inputs="endless", variables=[variables, variables])
    for pod, group in zip(pods, groups, strict=True):
        put(pod.pid, group)
    verdict = run_job(pods, lambda: cluster.verdict(name))
    said = "\n".join(pod.finish() for pod in pods)
    assert verdict.payer == "user" and not verdict.recoverable, said
    assert LINE.search(verdict.cause), (verdict.cause, said)


@pytest.mark.prove
def test_a_training_of_one_rank_takes_little_besides_its_model(cluster: Cluster) -> None:
    """Agent, fork server and rank fit into 800 MiB; pages of files are not among it, as the kernel drops them."""
    with memory_group(800 << 20) as group:
        pod = cluster.pod(1, "little", inputs="inputs")
        put(pod.pid, group)
        pod.finish()
    assert cluster.verdict("little").succeeded


@pytest.mark.prove
def test_a_rank_of_a_pod_by_itself(cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    variables: dict[str, Any] = python_path(tmp_path, HUNGRY.format(rank=0))
    pod = cluster.pod(1, "alone", inputs="endless", **variables)
    put(pod.pid, groups[0])
    said = pod.finish()
    # What it says is not read, as the kubelet calls its container OOMKilled; so the next one says it again.
    pod.reason = OOM_KILLED
    assert demystified(pod) == AttemptOutcome("user", "OOMKilled: Pod reported success despite being OOMKilled"), said
    second = cluster.pod(1, "alone", attempt=1, inputs="inputs")  # it would end well
    put(second.pid, groups[1])
    said += second.finish()
    for attempt in range(2):
        verdict = cluster.verdict("alone", attempt)
        assert verdict.payer == "user" and not verdict.recoverable, said
        assert LINE.search(verdict.cause), (verdict.cause, said)


#: One rank waits for the file ``go``, then takes most of what its pod has, and never gets further.
NEARLY = """
import time
from pathlib import Path
from slipstream.shared.machine.limits import memory_used
from slipstream.pipeline.train.loop import step
real, steps, taken = step.train_step, 0, []
def train_step(*arguments):
    global steps
    steps += 1
    if steps == {at}:
        while not Path("{go}").exists():
            time.sleep(0.05)
        while memory_used() < {most}:
            taken.append(b"x" * (8 << 20))
        time.sleep(3600)
    return real(*arguments)
step.train_step = train_step
"""


@dataclass
class Attempts:
    """Attempts at one training in a pod by itself, each killed when its memory is nearly full."""

    cluster: Cluster
    name: str
    directory: Path
    number: int = 0

    def killed_as_a_whole(self, group: Path, at: int, saved: int) -> MemoryNote:
        """As the kernel does on control groups of version 2, in the ``at``-th step of an attempt that has saved up to
        step ``saved``. Returns what it noted."""
        go, attempt = self.directory / f"go-{self.number}", self.number
        code = NEARLY.format(at=at, most=0.94 * LIMIT, go=go)
        variables: dict[str, Any] = python_path(self.directory / str(attempt), code)
        pod = self.cluster.pod(1, self.name, attempt=attempt, inputs="endless", **variables)
        put(pod.pid, group)
        self.wait(pod, lambda: any(f"step-{saved:012d}." in key for key in self.manifests()))
        go.touch()
        self.wait(pod, lambda: any(note.attempt == attempt for note in self.notes()))
        (note,) = self.notes()
        pod.kill()
        pod.finish()
        self.number += 1
        return note

    def wait(self, pod: PodProcess, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert pod.running and time.monotonic() < deadline, pod.said()
            time.sleep(0.05)

    def manifests(self) -> list[str]:
        return [key for key in self.cluster.home(self.name) if key.endswith("/manifest.json")]

    def notes(self) -> list[MemoryNote]:
        keys = [key for key in self.cluster.bucket.keys(f"{self.name}/") if "/memory/" in key]
        return [MemoryNote(**json.loads(self.cluster.bucket.read(key))) for key in keys]


@pytest.mark.prove
def test_the_third_attempt_knows_why_two_were_killed(cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    attempts = Attempts(cluster, "unnoted", tmp_path)
    for number, at in enumerate((15, 3)):
        note = attempts.killed_as_a_whole(groups[number], at, saved=10)
        assert (note.progress, note.times, note.limit) == ("10", number + 1, LIMIT)
        assert 0.9 * LIMIT <= note.used <= LIMIT
    third = cluster.pod(1, "unnoted", attempt=2, inputs="endless")
    put(third.pid, groups[0])
    said = third.finish()
    verdict = cluster.verdict("unnoted", 2)
    assert verdict.payer == "user" and not verdict.recoverable, said
    assert re.search(
        r"train: out of memory: the last 2 attempts were killed when they had taken 1\.\d+ GiB of 1\.17 GiB; raise "
        r"stages\.train\.memory in the profile",
        verdict.cause,
    )


@pytest.mark.prove
def test_who_gets_on_between_two_ends_is_not_refused(cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    """A node may be lost twice while memory is nearly full. An attempt that ends otherwise deletes the note."""
    attempts = Attempts(cluster, "gets-on", tmp_path)
    for number, saved in enumerate((10, 20)):
        note = attempts.killed_as_a_whole(groups[number], 15, saved)
        assert (note.progress, note.times) == (str(saved), 1)
    third = cluster.pod(1, "gets-on", attempt=2, inputs="endless")
    put(third.pid, groups[0])
    attempts.wait(third, lambda: any("step-000000000040." in key for key in attempts.manifests()))
    third.terminate()
    said = third.finish()
    assert cluster.verdict("gets-on", 2).recoverable, said
    assert attempts.notes() == []


@pytest.mark.prove
def test_a_long_named_execution_does_not_read_the_note_of_another(
    cluster: Cluster, groups: list[Path], tmp_path: Path
) -> None:
    """Both executions and the raw output's prefix, in which propeller hashes such names, are in one place."""
    hungry, healthy = ("f" * 62 + last for last in "ab")
    attempts = Attempts(cluster, hungry, tmp_path)
    for number, at in enumerate((15, 3)):
        assert attempts.killed_as_a_whole(groups[number], at, saved=10).times == number + 1
    second = cluster.pod(1, healthy, attempt=2, inputs="inputs", beside=hungry)
    put(second.pid, groups[0])
    said = second.finish()
    assert cluster.verdict(healthy, 2).succeeded, said
    third = cluster.pod(1, hungry, attempt=2, inputs="endless")
    put(third.pid, groups[1])
    said = third.finish()
    assert "out of memory: the last 2 attempts were killed" in cluster.verdict(hungry, 2).cause, said
    assert attempts.notes() == []
