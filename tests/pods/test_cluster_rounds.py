"""Propeller's failed rounds (``status.failedAttempts``): eleven end an execution, with any number of task retries."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.rounds import AGAIN_S, RETRIES, AdminUnavailable, RetriesExhausted
from tests.support.faulty_s3 import FaultyS3
from tests.support.shell_tasks import Shell, running_pod, under_way, until

EXHAUSTED = r"max number of system retry attempts \[11/10\] exhausted"
#: Until the file appears.
WAITS = "until [ -e {go} ]; do sleep 0.05; done"


@pytest.fixture
def bucket(server: FaultyS3) -> S3Bucket:
    return S3Bucket(server.url, "rounds", patient=False)


def away(server: FaultyS3) -> Callable[[], None]:
    """Refuse every request until what is returned is called."""
    server.down_until, server.refused = float("inf"), 0

    def back() -> None:
        server.down_until = 0.0

    return back


@pytest.mark.prove
def test_eleven_failed_rounds_end_a_cached_task_in_its_midst_and_its_pod(
    bucket: S3Bucket, server: FaultyS3, tmp_path: Path
) -> None:
    execution = Shell("sleep 60", cached=True, retries=5).execution(bucket, tmp_path)
    with under_way(execution) as running:
        pod = running_pod(execution, 0)
        back, began = away(server), time.monotonic()
        with pytest.raises(RetriesExhausted, match=EXHAUSTED):
            running.result()
        took = time.monotonic() - began
        back()
    assert execution.rounds.failed == RETRIES + 1 == server.refused
    assert took >= RETRIES * AGAIN_S, "more than five rounds in a second"
    assert pod.deleted and pod.ended and execution.pods == [pod], "a pod was left, or another attempt made"


@pytest.mark.prove
def test_with_more_retries_the_same_outage_is_survived_and_the_count_never_goes_back(
    bucket: S3Bucket, server: FaultyS3, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    task = Shell(WAITS.format(go=go), cached=True)
    execution = task.execution(bucket, tmp_path, max_workflow_retries=100_000)
    with under_way(execution) as running:
        pod = running_pod(execution, 0)
        back = away(server)
        until(lambda: execution.rounds.failed > RETRIES)
        back()
        failed = execution.rounds.failed
        go.touch()
        running.result()
    assert execution.rounds.failed >= failed > RETRIES
    assert execution.pods == [pod] and not pod.deleted and pod.exit_code == 0


@pytest.mark.prove
def test_in_the_midst_of_a_task_that_is_not_cached_nothing_is_read(
    bucket: S3Bucket, server: FaultyS3, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    execution = Shell(WAITS.format(go=go)).execution(bucket, tmp_path)
    with under_way(execution) as running:
        running_pod(execution, 0)
        back = away(server)
        time.sleep(3.0)  # a cached one reads its inputs every second
        back()
        go.touch()
        running.result()
    assert execution.rounds.failed == server.refused == 0


@pytest.mark.parametrize("refusals", [pytest.param(RETRIES, marks=pytest.mark.prove), RETRIES + 1])
def test_flyte_admin_away_costs_rounds_as_well(refusals: int, bucket: S3Bucket, tmp_path: Path) -> None:
    left = [True] * refusals

    def event() -> None:
        if left:
            left.pop()
            raise AdminUnavailable("connection refused")

    execution = Shell("true").execution(bucket, tmp_path, event=event)
    with under_way(execution) as running:
        if refusals > RETRIES:
            with pytest.raises(RetriesExhausted, match=EXHAUSTED):
                running.result()
        else:
            running.result()
    assert not left and execution.rounds.failed == refusals
    assert len(execution.pods) == (refusals <= RETRIES)


def test_outcomes_that_cannot_be_read_are_read_in_a_later_round(
    bucket: S3Bucket, server: FaultyS3, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    execution = Shell(WAITS.format(go=go)).execution(bucket, tmp_path)
    fired = len(server.fired)
    with under_way(execution) as running:
        running_pod(execution, 0)
        server.inject("GET", *["503"] * 3)
        go.touch()
        running.result()
    assert execution.rounds.failed == 3 == len(server.fired) - fired and len(execution.pods) == 1
