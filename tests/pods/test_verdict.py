"""Out of memory on one rank of a job: whatever the order of events, the one verdict is that it is not retried, or in a
step that it is, with smaller micro-batches.

The pods here are processes without torch's agent: two workers of each end by :meth:`Workspace.work` in a seeded order,
and the pod leaves by :func:`one_verdict`, against S3. ``test_departure.py`` runs whole pods.
"""

import atexit
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs

from slipstream.flyte import departure, last_line
from slipstream.flyte.departure import JobResult, OutputPrefix, error_document, one_verdict
from slipstream.flyte.failures import PodPreempted
from slipstream.flyte.metadata import STAGE
from slipstream.operations.proofs.processes import FORK
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, read_outcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.shared.errors import UserError
from slipstream.shared.storage import open_reader, retry
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3
from tests.support.job_pods import LOST_PEER, OUT_OF_MEMORY, PREEMPTED, SMALLER, Play, pod, run_job


@pytest.fixture(autouse=True)
def not_the_last_line_of_the_tests() -> Iterator[None]:
    yield
    atexit.unregister(last_line.print_last_line)


@pytest.fixture
def environment(store: FaultyS3) -> Iterator[dict[str, str]]:
    yield {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}
    store.slow.clear()
    store.plan.clear()


def started(process: BaseProcess) -> BaseProcess:
    process.start()
    return process


def verdict_of(
    name: str, environment: dict[str, str], tmp_path: Path, plays: list[Play], aggregated: bool = False
) -> AttemptOutcome:
    """Run the pods of a job, each as its play says, to the verdict on them all."""
    strategy = {"_F_DES": "earliest"} if aggregated else {}
    processes = [
        FORK.Process(target=pod, args=(f"s3://bucket/{name}", {**environment, **strategy}, tmp_path / f"{i}", play))
        for i, play in enumerate(plays)
    ]
    pods = [
        PodProcess(f"{name}-{i}", partial(started, each), tmp_path / f"{i}.log", 10) for i, each in enumerate(processes)
    ]
    for each in pods:
        each.begin()
    bucket = S3Bucket(environment["AWS_ENDPOINT_URL"], "bucket")
    verdict = run_job(pods, lambda: read_outcome(bucket, name, aggregated)[0])
    # What was read while pods still ran is what stays.
    assert read_outcome(bucket, name, aggregated)[0] == verdict
    # A pod that was still at work when it was told to end dies of it.
    assert {each.exit_code for each in pods} <= {0, -signal.SIGTERM}
    return verdict


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == 0 else pytest.mark.prove) for seed in range(8)]
)
def test_out_of_memory_on_any_rank_in_any_order_is_final(
    seed: int, environment: dict[str, str], store: FaultyS3, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    guilty, aggregated = seed % 4, bool(seed // 4 % 2)
    plays = []
    for ranks in ((0, 1), (2, 3)):
        workers: list[tuple[int, Exception | None]] = [
            (rank, OUT_OF_MEMORY if rank == guilty else LOST_PEER) for rank in ranks
        ]
        draw.shuffle(workers)
        plays.append(Play(workers, seconds=draw.uniform(0, 0.3), agent_s=draw.choice([0.0, 0.3])))
    store.slow = {"error": draw.choice([0.0, 0.3])}
    verdict = verdict_of(f"order-{seed}", environment, tmp_path, plays, aggregated)
    assert verdict.payer and not verdict.recoverable, verdict
    assert "training.accumulation: out of memory" in verdict.cause


@pytest.mark.prove
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, 4))])
def test_in_a_step_it_is_worth_another_attempt_with_word_of_it(
    seed: int, environment: dict[str, str], store: FaultyS3, tmp_path: Path
) -> None:
    draw, guilty, plays = random.Random(seed), seed % 4, []
    for ranks in ((0, 1), (2, 3)):
        # The guilty rank's agent tells its other worker to end, which may take that for a preemption.
        other = PREEMPTED if guilty in ranks else LOST_PEER
        workers: list[tuple[int, Exception | None]] = [
            (rank, SMALLER if rank == guilty else draw.choice([LOST_PEER, other])) for rank in ranks
        ]
        draw.shuffle(workers)
        plays.append(Play(workers, seconds=draw.uniform(0, 0.3), agent_s=draw.choice([0.0, 0.3])))
    verdict = verdict_of(f"smaller-{seed}", environment, tmp_path, plays)
    assert (verdict.payer, verdict.recoverable) == ("user", True) and str(SMALLER) in verdict.cause


@pytest.mark.prove
@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(LOST_PEER, "gloo/transport", id="lost peer"),
        pytest.param(PREEMPTED, "spot terminate", id="preempted", marks=pytest.mark.prove),
    ],
)
def test_without_a_cause_the_attempt_is_repeated(
    error: Exception, message: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = [Play([(0, error), (1, error)], 0.0), Play([(2, error), (3, error)], 0.1)]
    verdict = verdict_of(message[:4], environment, tmp_path, plays)
    assert (verdict.payer, verdict.recoverable) == ("user", True) and message in verdict.cause


@pytest.mark.prove
@pytest.mark.parametrize("last", [0, pytest.param(1, marks=pytest.mark.prove)])
def test_a_pod_that_is_done_waits_for_the_result(
    last: int, environment: dict[str, str], store: FaultyS3, tmp_path: Path
) -> None:
    store.slow = {"outputs.pb": 1.0}
    plays = [Play([(0, None), (1, None)], 0.2 * (last == 0)), Play([(2, None), (3, None)], 0.2 * (last == 1))]
    assert verdict_of(f"last-{last}", environment, tmp_path, plays).succeeded


@pytest.mark.prove
def test_a_pod_that_fails_after_the_result_leaves_it_alone(environment: dict[str, str], tmp_path: Path) -> None:
    plays = [Play([(0, None), (1, None)], 0.5), Play([(2, None), (3, OUT_OF_MEMORY)], 0.0, after_result=True)]
    assert verdict_of("late", environment, tmp_path, plays).succeeded


def test_a_store_that_stays_away_ends_no_wait(
    store: FaultyS3, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.setattr(departure, "POLL_S", 0.02)
    monkeypatch.setattr(retry, "ATTEMPTS", 2)
    prefix = OutputPrefix("s3://bucket/away")
    store.inject("GET", *["503"] * 7, "403")
    S3Bucket(store.url, "bucket").write("away/outputs.pb", b"")
    assert departure.wait_for(prefix, 30, lambda found: found is not JobResult.NONE) is JobResult.SUCCESS
    assert len(store.fired) == 8
    # Recording a verdict is tried again as well, and given up in the end: then flytekit writes what it would have.
    store.inject("PUT", *["503"] * 5)
    assert departure.retry_until_done(lambda: prefix.leave(UserError("x")), 30)
    assert prefix.look() is JobResult.CAUSE
    store.inject("PUT", *["503"] * 100)
    assert not departure.retry_until_done(lambda: OutputPrefix("s3://bucket/gone").leave(UserError("x")), 0.1)


def test_a_pod_that_comes_too_late_takes_no_part(environment: dict[str, str]) -> None:
    prefix = OutputPrefix("s3://bucket/over")
    prefix.leave(FlyteRecoverableException("a peer was lost"))
    with pytest.raises(IgnoreOutputs, match="operator"), one_verdict(prefix):
        raise AssertionError("took part")


@pytest.mark.parametrize("prefix", ["s3://bucket/ranks", "local"])
def test_a_cause_replaces_a_consequence_and_nothing_replaces_a_cause(
    prefix: str, environment: dict[str, str], tmp_path: Path
) -> None:
    place = OutputPrefix(prefix if prefix.startswith("s3") else str(tmp_path / prefix))
    assert place.look() is JobResult.NONE
    place.leave(FlyteRecoverableException("a peer was lost"))
    assert place.look() is JobResult.CONSEQUENCE
    place.leave(UserError("out of memory"))
    assert place.look() is JobResult.CAUSE
    place.leave(PodPreempted("spot"))
    place.leave(ValueError("a second cause"))
    assert place.look() is JobResult.CAUSE
    with open_reader(f"{place.uri}/error.pb") as file:
        assert "out of memory" in ErrorDocument.FromString(file.read()).error.message


def test_the_document_is_flytekits_own_and_begins_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_F_WN", "worker-1")
    monkeypatch.setenv(STAGE, "train")
    error = error_document(UserError("training.accumulation: out of memory")).error
    assert (error.kind, error.code, error.worker) == (ContainerError.NON_RECOVERABLE, "USER:RuntimeError", "worker-1")
    assert error.message.startswith("training.accumulation: out of memory\n\nTrace:\n")
    assert "Message:\n\n    UserError: training.accumulation: out of memory" in error.message
    error = error_document(FlyteRecoverableException("a peer was lost")).error
    assert error.kind == ContainerError.RECOVERABLE and error.code == "USER:Recoverable"
    assert abs(error.timestamp.ToSeconds() - time.time()) < 5
