"""Unusable clusters and Flyte sites, failures and interrupts: one line of error, and everything is cleaned up."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from flyteidl.admin import project_pb2, version_pb2

from slipstream.flyte.remote.backend import FlyteBackend
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.doctor.kubectl import KubectlError
from slipstream.operations.proofs.cluster import command, proof
from slipstream.operations.proofs.cluster.kubernetes import Kubernetes
from slipstream.operations.proofs.cluster.proof import ActResult, ClusterProof
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.shared.errors import UserError
from tests.support import fake_kubectl
from tests.support.command_line import Ended, invoke
from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import BUCKET, FlyteAdmin, serving, write_config

NAMESPACE = "flytesnacks-development"


class WithProjects(FlyteAdmin):
    """Also says which projects and which version it has."""

    def ListProjects(self, request: Any, context: Any) -> Any:
        return project_pb2.Projects(projects=[project_pb2.Project(id="flytesnacks")])

    def GetVersion(self, request: Any, context: Any) -> Any:
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.8"))


class Cluster:
    """Answers kubectl as a cluster with one node; notes what was asked of it."""

    def __init__(self, memory: str = "256Gi", refused: tuple[str, ...] = ()) -> None:
        self.memory, self.refused = memory, refused
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> Any:
        self.asked.append(arguments)
        if arguments[:2] == ("auth", "can-i"):
            if "--subresource=exec" in arguments and "exec" in self.refused:
                raise KubectlError("kubectl auth can-i: no")
            return "yes"
        if arguments[0] == "config":
            if "context" in self.refused:
                raise KubectlError("kubectl config current-context: error: current-context is not set")
            return "test-cluster"
        if arguments[:2] == ("get", "nodes"):
            return {"items": [fake_kubectl.node("n1", {}, cpu="64", memory=self.memory, disk="1Ti")]}
        return {"items": []}


@pytest.fixture
def admin(server: FaultyS3) -> Iterator[WithProjects]:
    with serving(WithProjects(S3Bucket(server.url, BUCKET))) as its:
        yield its


def run(place: Path, endpoint: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *more: str) -> Ended:
    config = write_config(place / "flyte.yaml", endpoint)
    monkeypatch.setattr(command, "kubectl", cluster)
    words = ["local", "--image", "registry.example/slipstream:test", "--config", str(config), *more]
    return invoke(command.main, place, words, {})


def one_line(ended: Ended) -> str:
    assert ended.returncode == 1 and "Traceback" not in ended.stdout, ended.stdout
    lines = ended.stdout.splitlines()
    assert len(lines) == 1 or "left behind" in ended.stdout, ended.stdout
    return lines[-1]


def test_no_cluster(admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = one_line(run(tmp_path, admin.endpoint, Cluster(refused=("context",)), monkeypatch))
    assert "no cluster: kubectl config current-context: error: current-context is not set" in said


def test_a_namespace_without_rights(admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = one_line(run(tmp_path, admin.endpoint, Cluster(refused=("exec",)), monkeypatch))
    assert f"cluster test-cluster: you may not create pods/exec in namespace {NAMESPACE}; ask its admin" in said


def test_a_project_that_does_not_exist(admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = one_line(run(tmp_path, admin.endpoint, Cluster(), monkeypatch, "--project", "churn"))
    assert f"Flyte at {admin.endpoint} has no project 'churn'; expected one of flytesnacks" in said


def test_an_endpoint_that_speaks_grpc_but_is_no_flyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("localhost:0")
    other.start()
    try:
        said = one_line(run(tmp_path, f"localhost:{port}", Cluster(), monkeypatch))
    finally:
        other.stop(None)
    assert f"Flyte at localhost:{port} answers, but not as Flyte does" in said and "check `admin.endpoint`" in said


class Page(BaseHTTPRequestHandler):
    """A console or a proxy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def test_an_endpoint_that_serves_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=pages.serve_forever, daemon=True).start()
    try:
        said = one_line(run(tmp_path, f"localhost:{pages.server_port}", Cluster(), monkeypatch))
    finally:
        pages.shutdown()
    assert said.count("check `admin.endpoint`") == 1


@pytest.fixture
def packaged_once(package_for: Callable[[str], RegistrationArchive], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "package_workflows", lambda workdir, profile: package_for(profile.name))


@pytest.mark.usefixtures("packaged_once")
@pytest.mark.prove
def test_a_profile_that_the_cluster_has_no_room_for(
    admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = one_line(run(tmp_path, admin.endpoint, Cluster(memory="1Gi"), monkeypatch, "--yes"))
    assert "profile local: tasks.train.train: of 1 pods 0 fit on the cluster's 1 nodes (1 with less than 4Gi" in said
    assert not [call for call in admin.calls if "Create" in call]


@pytest.mark.parametrize("boxed", [True, False])
def test_a_package_that_cannot_be_made_is_the_last_line_of_pyflyte(
    admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boxed: bool
) -> None:
    lines = ["╭─ Error ─╮", "│ no such thing │", "╰─────────╯"] if boxed else ["Traceback", "no such thing", ""]
    script = tmp_path / "pyflyte"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    said = one_line(run(tmp_path, admin.endpoint, Cluster(), monkeypatch, "--yes"))
    assert said.endswith("pyflyte package: no such thing")


@pytest.mark.usefixtures("packaged_once")
def test_it_says_what_it_will_do_and_asks_first(
    admin: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run(tmp_path, admin.endpoint, Cluster(), monkeypatch, "--price", "3")
    assert "nothing was done: expected --yes" in one_line(ended)
    assert "cluster  test-cluster, namespace flytesnacks-development" in ended.stdout
    assert "8 executions, 12 attempts at a training of 1 pod: about 0.4 pod-hours of training, 1.2 at 3 an hour" in (
        ended.stdout
    )
    assert "train 4 times more" in ended.stdout and "left behind:" in ended.stdout
    assert not [call for call in admin.calls if "Create" in call]


# In its middle


class OneRun(ClusterProof):
    """A proof of one execution, of what is registered already."""

    def acts(self, workdir: Path) -> list[tuple[str, Callable[[], str]]]:
        self.version, self.data = "v1", "s3://flyte/table/"
        return [("a main job runs to its end", self.runs)]


@pytest.fixture
def started(admin: WithProjects, monkeypatch: pytest.MonkeyPatch) -> WithProjects:
    """FlyteAdmin that accepts executions, which never end."""
    monkeypatch.setattr(admin, "find", lambda kind, identifier, context: PLAN)
    monkeypatch.setattr(proof, "LOOK_S", 0.01)
    return admin


PLAN = type("Plan", (), {"default_inputs": type("Inputs", (), {"parameters": {}})})


def one_run(place: Path, admin: FlyteAdmin, cluster: Cluster, say: Callable[[str], None], **more: Any) -> OneRun:
    login = {"authType": "ExternalCommand", "command": ["echo", "first"]}
    config = write_config(place / "flyte.yaml", admin.endpoint, **login)
    flyte, kubernetes = (
        FlyteBackend(config, "flytesnacks", "development", "slipstream cluster-proof"),
        Kubernetes(NAMESPACE, cluster),
    )
    return OneRun("proof-x", flyte, kubernetes, "image", "local", 1, say, **more)


@pytest.mark.parametrize("minutes", [0.001])
def test_what_takes_too_long_did_not_hold_and_is_ended(started: WithProjects, tmp_path: Path, minutes: float) -> None:
    said: list[str] = []
    (row,) = one_run(tmp_path, started, Cluster(), said.append, minutes=0.001).run(tmp_path)
    assert not row.held and row.seen == "proof-x-0: waited 0.001 minutes for its end"
    assert list(started.executions) == ["proof-x-0"] and "  ended proof-x-0" in said
    assert started.calls[-1].endswith("/TerminateExecution")
    assert row.look.endswith("-l 'execution-id in (proof-x-0)'")


def test_stopped_in_its_middle_it_ends_what_it_started(
    started: WithProjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = one_run(tmp_path, started, Cluster(), print)

    def stopped(*of: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "finished", stopped)
    with pytest.raises(KeyboardInterrupt):
        whole.run(tmp_path)
    assert list(started.executions) == ["proof-x-0"] and started.calls[-1].endswith("/TerminateExecution")


def test_a_login_that_expires_in_its_middle(started: WithProjects, tmp_path: Path) -> None:
    started.token = "first"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line == "  proof-x-0":
            Thread(target=expire).start()

    def expire() -> None:
        while "proof-x-0" not in started.executions:
            pass
        started.token = "second"

    cluster = Cluster()
    whole = one_run(tmp_path, started, cluster, say)
    with pytest.raises(UserError, match="log in"):
        whole.run(tmp_path)
    assert cluster.asked == [("delete", "flyteworkflow", "proof-x-0", "--namespace", NAMESPACE, "--wait=false")]
    assert said[-1].startswith("  deleted proof-x-0 by kubectl, as Flyte at ") and "may show it as running" in said[-1]


def test_the_table_shows_what_did_not_hold_and_how_to_look_closer() -> None:
    rows = [
        ActResult("registers", True, "version abc", ""),
        ActResult("a main job runs to its end", False, "proof-x-0 failed: no room", "kubectl get pods -l proof-x-0"),
    ]
    text = command.results_table(rows)
    assert [line.split()[:2] for line in text.splitlines()[1:3]] == [["1", "yes"], ["2", "no"]]
    assert "proof-x-0 failed: no room" in text and text.endswith("1 of 2 held")
    assert "\n  2  kubectl get pods -l proof-x-0\n" in text and "\n  1  " not in text


def test_the_commands_of_the_cluster_are_kubectls(tmp_path: Path) -> None:
    """Deleting, evicting and killing, as kubectl is asked for it."""
    cluster, bodies = Cluster(), []

    def ask(*arguments: str) -> Any:
        if "--filename" in arguments:
            bodies.append(json.loads(Path(arguments[-1]).read_text()))
        return cluster(*arguments)

    pod = {"metadata": {"name": "p-worker-1", "uid": "u"}, "spec": {"containers": [{"name": "pytorch"}]}}
    kubernetes = Kubernetes(NAMESPACE, ask)
    for how in ("deleted", "evicted", "killed"):
        kubernetes.lose(pod, how)
    deleted, evicted, killed = cluster.asked
    assert deleted == ("delete", "pod", "p-worker-1", "--namespace", NAMESPACE, "--wait=false")
    assert evicted[:3] == ("create", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/p-worker-1/eviction")
    assert bodies == [
        {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p-worker-1", "namespace": NAMESPACE}}
    ]
    assert killed[-3:] == ("sh", "-c", "kill -9 -1") and "pytorch" in killed


def test_a_terminal_is_asked_and_a_no_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="expected --yes"):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
        command.agreed(False)
    command.agreed(True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Job failed:\n\tPyTorchJobFailed - PyTorchJob f4-n0-0 is failed because 1 Worker replica(s) failed.",
            "PyTorchJobFailed: … 1 Worker replica(s) failed.",
        ),
        ("UnexpectedObjectDeletion: object gone\nmore", "UnexpectedObjectDeletion: object gone"),
        ("Job failed:", "Job failed:"),
        ("", "no reason given"),
    ],
)
def test_the_reason_of_a_lost_attempt_is_its_cause(message: str, expected: str) -> None:
    """The first message is that of a real cluster (Flyte 1.16.8, training-operator 1.9)."""
    assert proof.reason(message) == expected
