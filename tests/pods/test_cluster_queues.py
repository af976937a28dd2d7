"""Jobs that wait on the rehearsed cluster: for a quota, in Volcano's queue, and for each other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slipstream.flyte.before_start import PATIENCE_S, attempt_patience
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.operator import Namespace
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.rounds import AGAIN_S, OPERATOR_TIMEOUT_S, RETRIES, RetriesExhausted
from tests.support.faulty_s3 import FaultyS3
from tests.support.proving import first_few
from tests.support.scheduler import Scheduler, SchedulerNode
from tests.support.shell_tasks import Shell, under_way, until

WAITS = "until [ -e {go} ]; do sleep 0.05; done"
EXHAUSTED = r"\[11/10\] exhausted.*hasn't updated the pytorch custom resource"
#: In place of a minute.
SHORT_S = 1.0
#: A pod that waits for the other as long as a training's pod does, with 20 s in place of 15 minutes.
MEETS = """
import os, time
from pathlib import Path
from slipstream.flyte import before_start
before_start.PATIENCE_S = 20.0
job, place = os.environ["HOSTNAME"].rpartition("-")[0], Path("{place}")
(place / os.environ["HOSTNAME"]).touch()
deadline = time.monotonic() + before_start.attempt_patience()
while not all((place / f"{{job}}-{{number}}").exists() for number in range(2)):
    if time.monotonic() > deadline:
        raise SystemExit(1)
    time.sleep(0.02)
"""


@pytest.fixture
def bucket(server: FaultyS3) -> S3Bucket:
    return S3Bucket(server.url, "queues", patient=False)


@pytest.mark.parametrize("volcano", first_few([False, True]))
def test_a_job_that_waits_for_its_pods_ends_61_s_after_its_creation(
    volcano: bool, bucket: S3Bucket, tmp_path: Path
) -> None:
    """A quota refuses its second pod, or its PodGroup is pending; no retry of the task is spent."""
    namespace = Namespace(quota=1, volcano=volcano)
    job = Shell("sleep 60", job=True, retries=5)
    execution = job.execution(bucket, tmp_path, namespace=namespace, operator_timeout_s=SHORT_S)
    began = time.monotonic()
    with under_way(execution) as running:
        with pytest.raises(RetriesExhausted, match=EXHAUSTED):
            running.result()
        took = time.monotonic() - began
    assert OPERATOR_TIMEOUT_S == 60.0 and SHORT_S + RETRIES * AGAIN_S <= took <= SHORT_S + 10
    (attempt,) = execution.record.attempts
    assert len(attempt.pods) == (0 if volcano else 1) and all(pod.ended for pod in attempt.pods)


@pytest.mark.prove
@pytest.mark.parametrize("volcano", first_few([False, True]))
def test_with_a_longer_timeout_it_waits_and_runs(volcano: bool, bucket: S3Bucket, tmp_path: Path) -> None:
    namespace, go = Namespace(quota=1, volcano=volcano), tmp_path / "go"
    job = Shell(WAITS.format(go=go), job=True)
    execution = job.execution(bucket, tmp_path, namespace=namespace, operator_timeout_s=60.0)
    with under_way(execution) as running:
        time.sleep(2 * SHORT_S)
        assert not running.done() and execution.rounds.failed == 0
        namespace.quota = 2
        until(lambda: len(execution.pods) == 2)
        go.touch()
        running.result()


def test_a_plain_pod_that_a_quota_refuses_waits(bucket: S3Bucket, tmp_path: Path) -> None:
    namespace = Namespace(quota=0)
    execution = Shell("true").execution(bucket, tmp_path, namespace=namespace, operator_timeout_s=0.1)
    with under_way(execution) as running:
        time.sleep(0.5)
        assert not running.done() and not execution.pods and execution.rounds.failed == 0
        namespace.quota = 1
        running.result()


class Interleaving(Scheduler):
    """In their first two attempts, gives two jobs one place each: it has their pods wait until all four are there."""

    held: tuple[PodProcess, ...] = ()

    def admit(self, pod: PodProcess) -> None:
        pod.left = self.place
        with self.lock:
            self.held += (pod,)
            attempt = pod.name.rpartition("-worker-")[0]
            together = [each for each in self.held if each.name.startswith(attempt)]
            if len(together) == 4 or attempt not in ("n0-0", "n0-1"):
                self.waiting += sorted(together, key=lambda each: each.name)
                self.held = tuple(each for each in self.held if each not in together)
        self.place()


@pytest.mark.prove
def test_two_jobs_that_wait_for_each_other_both_finish(bucket: S3Bucket, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    (tmp_path / "pod.py").write_text(MEETS.format(place=tmp_path / "meet"))
    job = Shell(f"exec {sys.executable} {tmp_path / 'pod.py'}", job=True, retries=5)
    scheduler = Interleaving(SchedulerNode("m", room=2))
    first, second = (job.execution(bucket, tmp_path, name, admit=scheduler.admit) for name in "ab")
    with under_way(first) as running, under_way(second) as other:
        running.result()
        other.result()
    attempts = [[attempt.outcome for attempt in each.record.attempts] for each in (first, second)]
    assert all(outcomes[0] and not outcomes[0].succeeded for outcomes in attempts), "they gave up together"
    numbers = sorted(len(outcomes) for outcomes in attempts)
    assert numbers[0] == 2 and numbers[1] <= 3, "the second time one gave up earlier, and the other got its place"


def test_later_attempts_wait_as_their_jobs_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def patience(job: str, attempt: int, worker: int = 0) -> float:
        monkeypatch.setenv("HOSTNAME", f"{job}-n0-{attempt}-worker-{worker}")
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", str(attempt))
        return attempt_patience()

    assert patience("a", 0) == patience("b", 0) == PATIENCE_S
    later = [patience(job, attempt) for job in "ab" for attempt in (1, 2)]
    assert len(set(later)) == 4 and all(PATIENCE_S <= each < 2 * PATIENCE_S for each in later)
    assert patience("a", 1, worker=0) == patience("a", 1, worker=1), "all pods of a job wait as long"
