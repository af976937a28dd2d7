"""Room for fewer pods than there are: which run, and which wait until another has ended."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.operations.proofs.rehearsal.pods import PodProcess
from tests.support.scheduler import Scheduler, SchedulerNode, tolerates
from tests.support.shell_tasks import until, until_ready

Job = list[PodProcess]


@pytest.fixture
def admit(tmp_path: Path) -> Iterator[Callable[[Scheduler, str], PodProcess]]:
    pods: list[PodProcess] = []

    def begin(scheduler: Scheduler, name: str) -> PodProcess:
        pods.append(PodProcess.start(name, ["sleep", "60"], {}, tmp_path / name, 5.0, admit=scheduler.admit))
        return pods[-1]

    yield begin
    for pod in pods:
        pod.kill()
        pod.finish()


@pytest.mark.parametrize("seed", range(6))
def test_of_two_jobs_of_two_in_room_for_three_one_is_complete_and_the_other_waits(
    seed: int, admit: Callable[[Scheduler, str], PodProcess]
) -> None:
    scheduler = Scheduler(SchedulerNode("m", room=3))
    names = ["a0", "a1", "b0", "b1"]
    random.Random(seed).shuffle(names)
    pods = {name: admit(scheduler, name) for name in names}
    jobs = sorted(([pods[f"{job}{number}"] for number in range(2)] for job in "ab"), key=runs)
    half, whole = jobs
    assert (runs(half), runs(whole)) == (1, 2), "three places, and two pods are the most that a job takes"
    for pod in whole:
        pod.delete()
    until(lambda: runs(half) == 2)
    assert min(pod.ended for pod in whole) <= max(pod.started for pod in half)


def test_two_jobs_of_two_in_room_for_two_can_block_each_other(admit: Callable[[Scheduler, str], PodProcess]) -> None:
    scheduler = Scheduler(SchedulerNode("m", room=2))
    pods = [admit(scheduler, name) for name in ("a0", "b0", "a1", "b1")]
    time.sleep(0.3)
    assert [pod.running for pod in pods] == [True, True, False, False]
    assert [pod.pending for pod in pods] == [False, False, True, True]


def test_a_pod_keeps_its_place_through_its_grace_period(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerNode("m", room=1))
    script = "trap 'sleep 0.5; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    first, second = (
        PodProcess.start(name, ["sh", "-c", script], {}, tmp_path / name, 5.0, admit=scheduler.admit) for name in "ab"
    )
    until_ready(first)
    first.delete()
    assert second.pending
    until(lambda: second.running)
    assert second.started >= first.ended > 0
    second.kill()
    second.finish()


@pytest.mark.parametrize(
    ("toleration", "taint"),
    itertools.product(
        [{}, {"key": "spot", "operator": "Exists"}, {"key": "spot", "effect": "NoExecute"}], ["spot", "gpu"]
    ),
)
def test_a_taint_is_tolerated_by_its_key_and_effect(toleration: dict[str, str], taint: str) -> None:
    assert tolerates(toleration, taint) == (toleration == {"key": "spot", "operator": "Exists"} and taint == "spot")


def runs(job: Job) -> int:
    return sum(pod.running for pod in job)
