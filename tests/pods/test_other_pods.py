"""Pods of an incomplete job: they log which pods they wait for, and an optional stage is given up."""

import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from slipstream.flyte import before_start
from slipstream.flyte.before_start import WaitingForPods, rendezvous_timeouts, waiting_for_pods
from slipstream.operations.proofs.processes import free_port
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.pipeline.collectives.config import CollectivesConfig
from tasks.collectives import rendezvous_timeout
from tests.support.job_pods import run_job
from tests.support.scheduler import Scheduler, SchedulerNode
from tests.support.training_pods import Cluster, python_path

#: In place of half a minute.
SOON = "import slipstream.flyte.before_start as other_pods; other_pods.SAY_AFTER_S = 1.0"


def job(number: int, name: str, port: int) -> dict[str, Any]:
    """What the operator and Kubernetes tell a pod of a job of two."""
    return {
        "HOSTNAME": f"{name}-worker-{number}",
        "PET_NNODES": "2:2",
        "PET_NODE_RANK": str(number),
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
    }


@pytest.mark.prove
def test_a_training_says_for_whom_it_waits_and_then_trains(cluster: Cluster, tmp_path: Path) -> None:
    port, own = free_port(), python_path(tmp_path, SOON, before="slipstream.flyte.elastic")
    first = cluster.pod(2, "waits", number=0, **{**job(0, "waits", port), **own})
    deadline = time.monotonic() + 60
    while "this pod has waited" not in first.said():
        assert first.running and time.monotonic() < deadline, first.said()
        time.sleep(0.1)
    said = "s for the 2 pods of this job: waits-worker-0, waits-worker-1 (no room on the cluster, or still starting)"
    assert said in first.said()
    second = cluster.pod(2, "waits", number=1, **job(1, "waits", port))
    assert "validation loss" in first.finish() and second.finish()
    assert cluster.verdict("waits").succeeded
    assert re.search(r"late pods(: \d+ % | \(\d+ %\))", first.said())


def write_benchmark(cluster: Cluster) -> None:
    """The inputs of a benchmark that waits for 3 s."""
    context, config = FlyteContextManager.current_context(), CollectivesConfig(timeout=3)
    literal = TypeEngine.to_literal(
        context, config, CollectivesConfig, TypeEngine.to_literal_type(CollectivesConfig)
    ).to_flyte_idl()
    cluster.bucket.write("benchmark.pb", LiteralMap(literals={"config": literal}).SerializeToString())


@pytest.mark.prove
def test_a_benchmark_without_its_peers_is_given_up_for_good(cluster: Cluster) -> None:
    write_benchmark(cluster)
    variables = job(0, "alone", free_port())
    pod = cluster.pod(2, "left-out", number=0, inputs="benchmark", **variables)
    said, verdict = pod.finish(), cluster.verdict("left-out")
    assert (verdict.payer, verdict.recoverable) == ("user", False), said
    assert "collectives: its 2 pods did not meet within 3 s (collectives.timeout), so it is skipped" in verdict.cause


@pytest.mark.prove
def test_a_training_and_a_benchmark_in_room_for_three_do_not_block_each_other_for_good(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One place is somebody else's, so each of the two gets one, and its other pod waits."""
    write_benchmark(cluster)
    room = SchedulerNode("room", 3)
    scheduler = Scheduler(room)
    small = replace(cluster, admit=scheduler.admit)
    other = PodProcess.start("other", ["sleep", "600"], {}, tmp_path / "other", admit=scheduler.admit)
    ports = {"inputs": free_port(), "benchmark": free_port()}
    pods = {
        (inputs, number): small.pod(
            2, f"few-{inputs}", number=number, inputs=inputs, **job(number, f"few-{inputs}", ports[inputs])
        )
        for number in range(2)
        for inputs in ports
    }
    training, benchmark = ([pods[inputs, number] for number in range(2)] for inputs in ports)
    try:
        assert room.pods == [other, training[0], benchmark[0]] and training[1].pending and benchmark[1].pending
        left_out = run_job(benchmark, lambda: cluster.verdict("few-benchmark"))
        assert (left_out.payer, left_out.recoverable) == ("user", False), benchmark[0].said()
        assert "did not meet within 3 s (collectives.timeout), so it is skipped" in left_out.cause
        assert run_job(training, lambda: cluster.verdict("few-inputs")).succeeded, training[0].said()
        assert other.running, "the other pod ended"
    finally:
        for pod in (other, *training, *benchmark):
            pod.kill()
    assert training[1].started >= benchmark[0].ended, "it got the place that the benchmark gave up"
    assert "validation loss" in training[0].said()


@pytest.mark.parametrize(("there", "absent"), [((), ["j-worker-0", "j-worker-1"]), (("j-worker-0",), ["j-worker-1"])])
def test_who_is_missing_is_told_by_the_names(
    there: tuple[str, ...], absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(name: str, port: object) -> list[object]:
        if name not in there:
            raise socket.gaierror("Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("HOSTNAME", "j-worker-0")
    waiting = WaitingForPods(2)
    assert f"for the 2 pods of this job: {', '.join(absent)} (no room" in str(waiting)
    waiting.met.set()
    assert str(waiting) == ""
    monkeypatch.setenv("HOSTNAME", "laptop")
    assert str(WaitingForPods(2)).endswith("their agents to meet")


def test_who_has_no_peers_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(before_start, "SAY_AFTER_S", 0.01)
    for nodes, pause in ((1, 0.1), (2, 0.0)):
        with waiting_for_pods("train", nodes) as waiting:
            time.sleep(pause)
        assert waiting.met.is_set()
    assert capsys.readouterr().err == ""


def test_the_benchmark_waits_as_long_as_its_setting_says() -> None:
    assert rendezvous_timeout({"config": CollectivesConfig(timeout=7.4)}) == 7.4
    assert rendezvous_timeouts(7.4) == {"timeout": 7, "join_timeout": 7, "read_timeout": 7}
    assert set(rendezvous_timeouts(0.2).values()) == {1}
