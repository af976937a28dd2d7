"""The rehearsed cluster on pods that end, are lost or are deleted; small shell scripts stand in for pods."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import LiteralMap

from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.kills import STRIKES, How, Kill, Kills
from slipstream.operations.proofs.rehearsal.operator import Aborted, watch_job, watch_pod
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, cause_of, read_outcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from tests.support.faulty_s3 import FaultyS3
from tests.support.job_pods import never
from tests.support.processes import running
from tests.support.shell_tasks import until, until_ready

Start = Callable[..., PodProcess]
SLEEP = "sleep 60"
JOB_FAILED = "PyTorchJobFailed: 1 Worker replica(s) failed"
DEAF = "trap '' TERM; while :; do sleep 0.05; done"
#: Told to end, it saves first.
FAREWELL = "trap 'sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    pods: list[PodProcess] = []

    def begin(script: str, grace_s: float = 5.0, admit: Callable[[PodProcess], None] | None = None) -> PodProcess:
        name = f"p{len(pods)}"
        pods.append(PodProcess.start(name, ["sh", "-c", script], {}, tmp_path / name, grace_s, admit=admit))
        return pods[-1]

    yield begin
    for pod in pods:
        pod.kill()
        pod.waiting.join()


NOT_ABORTED = threading.Event()


def never_admitted(pod: PodProcess) -> None:
    """It stays Pending."""


def test_exit_0_leaves_the_verdict_to_the_outputs(start: Start) -> None:
    assert watch_pod([start("true")], NOT_ABORTED) is None


@pytest.mark.parametrize(("script", "cause"), [("kill -KILL $$", "SIGKILL"), ("exit 3", "exit code 3")])
def test_a_pod_that_fails_is_the_systems_failure(start: Start, script: str, cause: str) -> None:
    assert watch_pod([start(script)], NOT_ABORTED) == AttemptOutcome("system", f"the pod ended by {cause}")


def test_a_deleted_pod_is_the_systems_failure_before_it_has_ended(start: Start) -> None:
    pod = start(DEAF, grace_s=0.5)
    time.sleep(0.2)  # until the shell has its trap
    pod.delete()
    assert watch_pod([pod], NOT_ABORTED) == AttemptOutcome("system", "UnexpectedObjectDeletion")
    assert pod.running
    pod.waiting.join(5)
    assert pod.exit_code == -signal.SIGKILL and pod.ended - pod.started >= 0.7


def test_whatever_a_container_started_ends_with_its_main_process(start: Start, tmp_path: Path) -> None:
    pod = start(f"{SLEEP} & echo $! > {tmp_path}/child; exit 0")
    pod.waiting.join(5)
    child = int((tmp_path / "child").read_text())
    until(lambda: not running(child))


def test_a_job_has_succeeded_with_its_first_pod_and_the_others_are_cleaned_away(start: Start) -> None:
    pods = [start(SLEEP), start("true")]
    assert watch_job(pods, never, "CLEANPOD_POLICY_ALL", NOT_ABORTED) is None
    pods[0].waiting.join(5)
    assert pods[0].deleted and pods[0].exit_code == -signal.SIGTERM


def test_a_job_without_cleaning_leaves_them_alone(start: Start) -> None:
    pods = [start(SLEEP), start("true")]
    assert watch_job(pods, never, "CLEANPOD_POLICY_NONE", NOT_ABORTED) is None
    assert pods[0].running and not pods[0].deleted


def test_a_job_has_failed_with_its_first_pod_and_the_user_pays(start: Start) -> None:
    verdict = watch_job([start(SLEEP), start("kill -KILL $$")], never, "CLEANPOD_POLICY_ALL", NOT_ABORTED)
    assert verdict == AttemptOutcome("user", f"{JOB_FAILED}: worker 1 ended by SIGKILL")


def test_a_deleted_pod_of_a_job_has_failed_it_before_it_ends_and_the_others_live_on_as_well(start: Start) -> None:
    pods = [start(FAREWELL, grace_s=20.0), start(FAREWELL, grace_s=20.0)]
    for pod in pods:
        until_ready(pod)
    pods[1].delete()
    verdict = watch_job(pods, never, "CLEANPOD_POLICY_RUNNING", NOT_ABORTED)
    assert verdict == AttemptOutcome("user", f"{JOB_FAILED}: worker 1 was deleted")
    assert all(pod.running and pod.deleted for pod in pods)
    assert ["saved" in pod.finish() for pod in pods] == [True, True]


def test_a_pod_of_a_job_that_is_killed_has_no_time_to_save(start: Start) -> None:
    pods = [start(FAREWELL, grace_s=20.0), start(FAREWELL, grace_s=20.0)]
    for pod in pods:
        until_ready(pod)
    pods[1].kill()
    verdict = watch_job(pods, never, "CLEANPOD_POLICY_NONE", NOT_ABORTED)
    assert verdict == AttemptOutcome("user", f"{JOB_FAILED}: worker 1 ended by SIGKILL")
    # Whatever is cleaned, propeller deletes the job.
    assert ["saved" in pod.finish() for pod in pods] == [True, False]


def test_a_pod_of_a_job_that_is_deleted_before_it_runs_is_made_anew(start: Start) -> None:
    pods = [start(SLEEP, admit=never_admitted), start(SLEEP)]
    old, other = pods
    old.delete()
    assert watch_job(pods, lambda index: start(f"exit {index}"), "CLEANPOD_POLICY_ALL", NOT_ABORTED) is None
    assert pods[0] is not old and old.process is None and pods[0].exit_code == 0 and pods[1] is other


def test_a_plain_pod_that_is_deleted_before_it_runs_is_the_systems_failure(start: Start) -> None:
    pod = start("touch ran", admit=never_admitted)
    assert pod.pending
    pod.delete()
    assert watch_pod([pod], NOT_ABORTED) == AttemptOutcome("system", "ResourceDeletedExternally")
    pod.begin()  # too late
    pod.finish()
    assert pod.exit_code is None and not (pod.log.parent / "ran").exists()


CHILD = "sleep 60 & echo ready; wait $!; exit 0"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("OOMKilled 0", "OOMKilled: Pod reported success despite being OOMKilled"),
        ("OOMKilled 137", "terminated with exit code (137). Reason [OOMKilled]"),
        ("OOMKilled 247", "terminated with exit code (247). Reason [OOMKilled]"),
    ],
)
def test_a_plain_pod_out_of_memory_is_the_users_failure_whatever_its_exit_code(
    start: Start, how: How, said: str
) -> None:
    pod = start(CHILD)
    until_ready(pod)
    STRIKES[how](pod)
    assert watch_pod([pod], NOT_ABORTED) == AttemptOutcome("user", said, recoverable=True)
    assert pod.exit_code == int(how.split()[1])


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ("OOMKilled 0", None),
        ("OOMKilled 137", AttemptOutcome("user", f"{JOB_FAILED}: worker 0 ended by exit code 137")),
    ],
)
def test_of_a_job_out_of_memory_only_the_exit_code_counts(
    start: Start, how: How, verdict: AttemptOutcome | None
) -> None:
    pods = [start(CHILD), start(SLEEP)]
    until_ready(pods[0])
    STRIKES[how](pods[0])
    assert watch_job(pods, never, "CLEANPOD_POLICY_ALL", NOT_ABORTED) == verdict


def test_an_aborted_execution_deletes_its_pods(start: Start) -> None:
    aborted, pod = threading.Event(), start(SLEEP)
    aborted.set()
    with pytest.raises(Aborted):
        watch_pod([pod], aborted)
    assert pod.deleted


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "deleted"])
def test_a_kill_strikes_before_the_write_that_it_names(start: Start, how: How) -> None:
    kill = Kill("n1", attempt=0, write=2, how=how, index=1)
    kills, pods = Kills([kill, Kill("n2", 0, 1, how)]), [start(SLEEP), start(SLEEP)]
    kills.watch("/bucket/run/n1/0/", "n1", 0, pods)
    for method, path in [("GET", "n1/0/a"), ("PUT", "n1/0/a"), ("PUT", "n10/0/a"), ("HEAD", "n1/0/b")]:
        kills.asked(method, f"/bucket/run/{path}")
    assert not kills.fired
    kills.asked("PUT", "/bucket/run/n1/0/b")
    pods[1].waiting.join(5)
    assert kills.fired == [kill] and [each.node for each in kills.missed] == ["n2"]
    assert pods[0].running and not pods[1].running and pods[1].deleted == (how == "deleted")


MESSAGE = """Trace:

    Traceback (most recent call last):
        raise SomeError

Message:

    SomeError: USER:Recoverable: error=what it was, cause=
========================
"""


def error(kind: int, origin: int) -> bytes:
    document = ErrorDocument()
    document.error.code, document.error.message = "SomeError", MESSAGE
    document.error.kind, document.error.origin = kind, origin
    return document.SerializeToString()


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        "USER:Recoverable: error=what it was, cause=what it was",
        "Message:\n\n  PodPreempted: USER:Recoverable: error=what it was, cause=USER:Recoverable: error=\n===\nFAILED",
    ],
)
def test_the_cause_is_found_in_every_form(message: str) -> None:
    assert cause_of(message) == "what it was"


def test_an_error_comes_before_outputs_and_neither_is_worth_another_attempt(server: FaultyS3) -> None:
    bucket = S3Bucket(server.url, "outcome")
    assert read_outcome(bucket, "nothing") == (AttemptOutcome("user", "OutputsNotFound"), {})
    outputs = LiteralMap()
    outputs.literals["o0"].scalar.primitive.integer = 1
    for place in ("well", "ill", "lost"):
        bucket.write(f"{place}/outputs.pb", outputs.SerializeToString())
    assert read_outcome(bucket, "well") == (AttemptOutcome("", ""), dict(outputs.literals))
    bucket.write("ill/error.pb", error(ContainerError.NON_RECOVERABLE, ExecutionError.USER))
    assert read_outcome(bucket, "ill")[0] == AttemptOutcome("user", "what it was", recoverable=False)
    bucket.write("lost/error.pb", error(ContainerError.RECOVERABLE, ExecutionError.SYSTEM))
    assert read_outcome(bucket, "lost")[0] == AttemptOutcome("system", "what it was")
