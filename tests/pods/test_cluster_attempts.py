"""Attempts at a task that loses pods: charged retry budget, overlapping pods, and the node of the last attempt."""

from pathlib import Path

import pytest
from flyteidl.core.tasks_pb2 import TaskTemplate

from slipstream.flyte.metadata import SPOT as SPOT_VARIABLE
from slipstream.flyte.metadata import SPOT_FROM_LABEL
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.kills import STRIKES, How
from slipstream.operations.proofs.rehearsal.outcomes import SYSTEM_RETRIES
from slipstream.operations.proofs.rehearsal.propeller import NodeFailed
from slipstream.operations.proofs.rehearsal.rendering import SPOT, SPOT_TOLERATION, primary_container
from tests.support.faulty_s3 import FaultyS3
from tests.support.scheduler import Scheduler, SchedulerNode
from tests.support.shell_tasks import NAME, Shell, running_pod, under_way, until, until_ready

#: Told to end, it takes its time; any attempt after the first is done soon.
FIRST_LASTS = (
    "[ $FLYTE_ATTEMPT_NUMBER = 0 ] || exec sleep 0.5; "
    "trap 'sleep 6; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
)


@pytest.fixture
def bucket(server: FaultyS3) -> S3Bucket:
    return S3Bucket(server.url, "attempts", patient=False)


@pytest.mark.prove
@pytest.mark.parametrize("job", [False, True])
def test_the_next_attempt_runs_beside_the_pods_of_the_one_before(job: bool, bucket: S3Bucket, tmp_path: Path) -> None:
    execution = Shell(FIRST_LASTS, job=job, retries=int(job)).execution(bucket, tmp_path, f"overlap-{job}".lower())
    pods = 1 + job
    with under_way(execution) as running:
        first = [running_pod(execution, number) for number in range(pods)]
        for pod in first:
            until_ready(pod)
        first[-1].delete()
        second = running_pod(execution, pods)
        assert all(pod.running and pod.deleted for pod in first), "ended before the next attempt"
        running.result()
    assert second.started < min(pod.ended for pod in first)
    failed, succeeded = (attempt.outcome for attempt in execution.record.attempts)
    assert succeeded and succeeded.succeeded and failed
    assert (failed.payer, failed.cause.partition(":")[0]) == (
        ("user", "PyTorchJobFailed") if job else ("system", "UnexpectedObjectDeletion")
    )
    assert execution.record.spent == {"user": int(job), "system": int(not job)}


@pytest.mark.prove
def test_the_last_attempt_that_the_system_pays_for_is_kept_from_spot_nodes(bucket: S3Bucket, tmp_path: Path) -> None:
    spot, demand = SchedulerNode("spot", room=9, taint=SPOT), SchedulerNode("on demand", room=9)
    task = Shell("sleep 60", interruptible=True)
    execution = task.execution(bucket, tmp_path, admit=Scheduler(spot, demand).admit)
    with under_way(execution) as running:
        for number in range(SYSTEM_RETRIES + 1):
            running_pod(execution, number).delete()
        with pytest.raises(NodeFailed, match="UnexpectedObjectDeletion"):
            running.result()
    tolerated = [[toleration["key"] for toleration in pod.tolerations] for pod in execution.pods]
    assert tolerated == [[SPOT], [SPOT], [SPOT], []]
    assert [pod.node for pod in execution.pods] == ["spot", "spot", "spot", "on demand"]
    assert execution.record.spent == {"user": 0, "system": SYSTEM_RETRIES + 1}


@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("chosen", [True, False, None])
def test_an_executions_choice_reaches_every_pod(
    bucket: S3Bucket, tmp_path: Path, profile: bool, chosen: bool | None
) -> None:
    execution = Shell("true", interruptible=profile).execution(bucket, tmp_path, interruptible=chosen)
    execution.run(NAME, {})
    spot = profile if chosen is None else chosen
    assert [pod.tolerations for pod in execution.pods] == [[SPOT_TOLERATION] if spot else []]


@pytest.mark.parametrize("job", [False, True])
def test_pods_are_deleted_at_their_deadline(bucket: S3Bucket, tmp_path: Path, job: bool) -> None:
    """Without it, the last failing element of a map task would keep its devices."""
    task = Shell("sleep 60", job=job, deadline_s=0.5)
    execution = task.execution(bucket, tmp_path, f"deadline-{job}".lower())
    with pytest.raises(NodeFailed, match="DeadlineExceeded"):
        execution.run(NAME, {})
    assert len(execution.pods) == 1 + job and all(pod.ended for pod in execution.pods)
    assert all(pod.ended - pod.started < 30 for pod in execution.pods)


def test_a_tasks_own_value_wins(bucket: S3Bucket, tmp_path: Path) -> None:
    """As on a real cluster: propeller lets a node's value win over the execution's."""
    execution = Shell("true").execution(bucket, tmp_path, interruptible=False)
    execution.package.workflows[NAME].nodes[0].metadata.interruptible = True
    execution.run(NAME, {})
    assert [pod.tolerations for pod in execution.pods] == [[SPOT_TOLERATION]]


def test_a_pod_knows_whether_it_is_interruptible() -> None:
    """Its environment takes propeller's label, so that costs follow the pod and not the profile."""
    task = TaskTemplate(config={"primary_container_name": "primary"})
    task.k8s_pod.pod_spec.update({"containers": [{"name": "primary", "env": [SPOT_FROM_LABEL]}]})
    for interruptible in (True, False):
        container = primary_container(task, interruptible=interruptible)
        assert container.environment == {SPOT_VARIABLE: str(interruptible).lower()}


def test_what_a_template_tolerates_by_itself_it_tolerates_on_demand_as_well() -> None:
    own = {"key": "own", "operator": "Exists", "effect": "NoSchedule"}
    task = TaskTemplate(config={"primary_container_name": "primary"})
    task.k8s_pod.pod_spec.update({"containers": [{"name": "primary"}], "tolerations": [own]})
    assert primary_container(task, interruptible=True).tolerations == [SPOT_TOLERATION, own]
    assert primary_container(task, interruptible=False).tolerations == [own]


@pytest.mark.prove
def test_a_pod_that_is_deleted_while_it_waits_for_room_is_the_systems_as_well(bucket: S3Bucket, tmp_path: Path) -> None:
    full = SchedulerNode("full", room=0)
    scheduler = Scheduler(full)
    execution = Shell("true").execution(bucket, tmp_path, admit=scheduler.admit)
    with under_way(execution) as running:
        until(lambda: bool(execution.pods))
        execution.pods[0].delete()
        full.room = 1
        running.result()
    failed, succeeded = (attempt.outcome for attempt in execution.record.attempts)
    assert failed and (failed.payer, failed.cause) == ("system", "ResourceDeletedExternally")
    assert succeeded and succeeded.succeeded and [pod.exit_code for pod in execution.pods] == [None, 0]


@pytest.mark.parametrize(
    "how", ["OOMKilled 137", *(pytest.param(f"OOMKilled {code}", marks=pytest.mark.prove) for code in (0, 247))]
)
def test_out_of_memory_spends_the_users_retries(how: How, bucket: S3Bucket, tmp_path: Path) -> None:
    execution = Shell("sleep 60 & echo ready; wait $!; exit 0", retries=1).execution(bucket, tmp_path, how[10:])
    with under_way(execution) as running:
        for number in range(2):
            pod = running_pod(execution, number)
            until_ready(pod)
            STRIKES[how](pod)
        with pytest.raises(NodeFailed, match="OOMKilled"):
            running.result()
    # Also with exit code 0, and though there are outputs.
    assert [pod.exit_code for pod in execution.pods] == [int(how[10:])] * 2
    assert execution.record.spent == {"user": 2, "system": 0}
