"""A rehearsal of the cluster: the packaged container command and environment of the training task, run as pods.

Nothing of a cluster is imitated but what it does for a pod: it fills in the templates of the command, it sets the
``PET_`` variables of a PyTorchJob, and it runs the container. Inputs, outputs and checkpoints are on S3.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from moto.server import ThreadedMotoServer
from safetensors.numpy import load_file

from tasks.artifacts.format import ArtifactWriter
from tasks.artifacts.prepared import TARGET, Signature, TensorSpec
from tasks.models.config import ModelConfig
from tasks.train.config import TrainingConfig
from tests.support.package import package
from tests.support.processes import free_port

BUCKET = "slipstream"
TRAIN = "tasks.train.task.train"

PROFILE = """
[stages.train]
nodes = {nodes}
processes = 1
retries = 3
data_cache_gib = {cache}
[stages.collectives]
nodes = {nodes}
processes = 1
"""


@dataclass(frozen=True)
class Cluster:
    """What the pods of these tests share: S3, the packaged task for each profile, and the inputs."""

    s3: Any
    environment: dict[str, str]
    templates: dict[int, Any]
    workdir: Path

    def pod(
        self, nodes: int, name: str, *, previous: str = "", inputs: str = "inputs", **variables: str
    ) -> subprocess.Popen[str]:
        """Start a pod of the training task packaged for ``nodes``, as attempt ``name``."""
        container = self.templates[nodes].container
        fills = {
            "input": f"s3://{BUCKET}/{inputs}.pb",
            "outputPrefix": f"s3://{BUCKET}/{name}/outputs",
            "rawOutputDataPrefix": f"s3://{BUCKET}/{name}/raw",
            "checkpointOutputPrefix": f"s3://{BUCKET}/{name}/checkpoints",
            "prevCheckpointPrefix": f"s3://{BUCKET}/{previous}/checkpoints" if previous else '""',
        }
        command = [re.sub(r"\{\{\.(\w+)\}\}", lambda m: fills[m[1]], part) for part in container.args]
        packaged = {pair.key: pair.value for pair in container.env}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Flyte names the execution in every pod; the pods of a PyTorchJob find each other by that name.
        machine = {"PATH": path, "HOME": str(self.workdir), "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-")}
        (self.workdir / name).mkdir(exist_ok=True)
        return subprocess.Popen(
            command,
            cwd=self.workdir / name,
            env={**machine, **self.environment, **packaged, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def keys(self, prefix: str) -> list[str]:
        return [o["Key"] for o in self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]

    def read(self, key: str) -> bytes:
        return self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def trained(self, name: str, into: Path) -> Path:
        """Download the trained model that attempt ``name`` handed on."""
        outputs = LiteralMap.FromString(self.read(f"{name}/outputs/outputs.pb"))
        prefix = outputs.literals["artifact"].scalar.blob.uri.removeprefix(f"s3://{BUCKET}/")
        for key in self.keys(prefix):
            path = into / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(key))
        return into

    def error(self, name: str) -> ErrorDocument:
        return ErrorDocument.FromString(self.read(f"{name}/outputs/error.pb"))


def blobs(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that a small network tells apart."""
    generator = np.random.default_rng(seed)
    target = generator.integers(0, 2, rows).astype("<i4")
    return (generator.normal(size=(rows, 6)) + 1.5 * target[:, None]).astype("<f4"), target


def write_prepared(directory: Path) -> None:
    signature = Signature((TensorSpec("numeric", "float32", (6,)),), "classification", "y", ("no", "yes"))
    writer = ArtifactWriter(directory)
    for seed, (split, rows) in enumerate({"train": 600, "validation": 200, "test": 200}.items()):
        records = np.zeros(rows, signature.record)
        records["numeric"], records[TARGET] = blobs(rows, seed)
        with writer.create(f"{split}-00000.rows", 4096 * signature.record.itemsize) as file:
            file.write(records.tobytes())
    writer.write_json("signature.json", signature.to_json())
    writer.finish("prepare", {"by": "the rehearsal"})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    workdir = tmp_path_factory.mktemp("cluster")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "FLYTE_AWS_ENDPOINT": f"http://{host}:{port}",
        "FLYTE_AWS_ACCESS_KEY_ID": "testing",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    s3 = boto3.client(
        "s3",
        endpoint_url=environment["FLYTE_AWS_ENDPOINT"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    s3.create_bucket(Bucket=BUCKET)
    write_prepared(workdir / "prepared")
    for path in (workdir / "prepared").iterdir():
        s3.put_object(Bucket=BUCKET, Key=f"prepared/{path.name}", Body=path.read_bytes())
    context = FlyteContextManager.current_context()
    short = TrainingConfig(epochs=6, batch_size=50, patience=0, checkpoint_every=10)
    endless = TrainingConfig(epochs=20_000, batch_size=50, patience=0, checkpoint_every=10)
    common: dict[str, tuple[Any, type]] = {
        "prepared": (FlyteDirectory(f"s3://{BUCKET}/prepared", remote_directory=False), FlyteDirectory),
        "model": (ModelConfig(arguments={"hidden": [16]}), ModelConfig),
        "code": ("", str),
    }
    for key, training in {"inputs": short, "endless": endless}.items():
        literals = {
            name: TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()
            for name, (value, kind) in {**common, "training": (training, TrainingConfig)}.items()
        }
        s3.put_object(Bucket=BUCKET, Key=f"{key}.pb", Body=LiteralMap(literals=literals).SerializeToString())
    templates = {}
    for nodes in (1, 2):
        profile = workdir / f"pods{nodes}.toml"
        # Two pods have no room for all of the 28 KB, so that their rows stream; one pod downloads them.
        profile.write_text(PROFILE.format(nodes=nodes, cache=2.2e-5 if nodes == 2 else 1.0))
        templates[nodes] = package(workdir, str(profile)).tasks[TRAIN]
    yield Cluster(s3, environment, templates, workdir)
    server.stop()


def finish(pod: subprocess.Popen[str]) -> str:
    output, _ = pod.communicate(timeout=180)
    return output


def until_saved(cluster: Cluster, pod: subprocess.Popen[str], name: str) -> None:
    """Wait until the pod has published a checkpoint."""
    deadline = time.monotonic() + 120
    while not any(key.endswith("/manifest.json") for key in cluster.keys(f"{name}/checkpoints")):
        assert pod.poll() is None and time.monotonic() < deadline, finish(pod)
        time.sleep(0.02)


def worker_of(pod: subprocess.Popen[str]) -> int:
    """The process id of the pod's only training process."""
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    (worker,) = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return worker


def pods_of_job(cluster: Cluster, name: str, previous: str = "") -> list[subprocess.Popen[str]]:
    """Both pods of one attempt of a PyTorchJob."""
    job = {
        "PET_NNODES": "2:2",  # as the operator writes it when the job has an elastic policy
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
    }
    return [cluster.pod(2, name, previous=previous, PET_NODE_RANK=str(rank), **job) for rank in range(2)]


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that two undisturbed pods train."""
    pods = pods_of_job(cluster, "world")
    outputs = [finish(pod) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert "world/outputs/error.pb" not in cluster.keys("world/outputs"), outputs
    assert all("streams s3://" in output for output in outputs), outputs
    return cluster.trained("world", tmp_path_factory.mktemp("world"))


def test_two_pods_of_a_pytorchjob_form_one_world(cluster: Cluster, world: Path) -> None:
    assert cluster.templates[2].type == "pytorch"
    history = json.loads((world / "history.json").read_text())
    assert history["world"]["size"] == 2
    assert history["steps_total"] == 6 * 600 // 50
    # Each rank took its own half of every batch: another world size gives the same global batches.
    assert history["best"]["accuracy"] > 0.9
    # One process group of two took checkpoints; two groups of one would each have claimed an attempt.
    assert cluster.keys("world/checkpoints/attempts") == ["world/checkpoints/attempts/0001"]


@pytest.mark.prove
@pytest.mark.parametrize("victim", [0, 1])  # one of them also keeps the rendezvous
def test_one_of_two_pods_is_killed_and_the_second_attempt_ends_the_same(
    victim: int, cluster: Cluster, world: Path, tmp_path: Path
) -> None:
    first, second = f"pair{victim}-1", f"pair{victim}-2"
    pods = pods_of_job(cluster, first)
    until_saved(cluster, pods[0], first)
    pods[victim].kill()
    survivor = pods[1 - victim]
    output = finish(survivor)
    # What a cluster does: it takes the job for failed, whatever the other pod says, and starts both again.
    assert survivor.returncode is not None and not [
        key for key in cluster.keys(f"{first}/outputs") if key.endswith("outputs.pb")
    ], output
    if f"{first}/outputs/error.pb" in cluster.keys(f"{first}/outputs"):
        error = cluster.error(first).error
        assert error.kind == error.RECOVERABLE, output

    pods = pods_of_job(cluster, second, previous=first)
    outputs = [finish(pod) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert any("goes on from step" in output for output in outputs), outputs
    resumed = cluster.trained(second, tmp_path)
    assert f"{first}/checkpoints/step-" in json.loads((resumed / "attempt.json").read_text())["resumed_from"]
    same_model(world, resumed)


def test_the_second_attempt_goes_on_where_the_first_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    whole = cluster.pod(1, "whole")
    output = finish(whole)
    assert whole.returncode == 0, output

    first = cluster.pod(1, "attempt1")
    until_saved(cluster, first, "attempt1")
    first.send_signal(signal.SIGKILL)
    finish(first)
    assert first.returncode == -signal.SIGKILL and not cluster.keys("attempt1/outputs")

    second = cluster.pod(1, "attempt2", previous="attempt1")
    output = finish(second)
    assert second.returncode == 0, output
    resumed = cluster.trained("attempt2", tmp_path / "resumed")
    attempt = json.loads((resumed / "attempt.json").read_text())
    assert "attempt1/checkpoints/step-" in attempt["resumed_from"]
    assert attempt["steps"] < 72 and f"goes on from step {72 - attempt['steps']}" in output
    same_model(cluster.trained("whole", tmp_path / "whole"), resumed)


def same_model(uninterrupted: Path, resumed: Path) -> None:
    """Killed or not, the weights are the same to the bit, and so is the history."""
    for weights in ("best.safetensors", "last.safetensors"):
        left, right = load_file(uninterrupted / weights), load_file(resumed / weights)
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    assert (resumed / "history.json").read_bytes() == (uninterrupted / "history.json").read_bytes()


@pytest.mark.prove
def test_a_worker_lost_to_a_signal_is_worth_another_attempt(cluster: Cluster) -> None:
    pod = cluster.pod(1, "lost", inputs="endless")
    until_saved(cluster, pod, "lost")
    os.kill(worker_of(pod), signal.SIGKILL)
    output = finish(pod)
    error = cluster.error("lost").error
    assert error.kind == error.RECOVERABLE, output
    assert "rank 0 was lost to SIGKILL" in error.message


@pytest.mark.prove
def test_a_pod_that_is_told_to_end_saves_and_is_worth_another_attempt(cluster: Cluster) -> None:
    pod = cluster.pod(1, "told", inputs="endless")
    until_saved(cluster, pod, "told")
    pod.send_signal(signal.SIGTERM)
    output = finish(pod)
    assert not [key for key in cluster.keys("told/outputs") if key.endswith("outputs.pb")], "an empty success"
    error = cluster.error("told").error
    assert error.kind == error.RECOVERABLE, output
    (key,) = [key for key in cluster.keys("told/checkpoints") if "/ledger/" in key]
    page = json.loads(cluster.read(key))
    assert page["ended"].startswith(f"left at step {page['last_step']}, saved"), page
    assert page["saved_step"] == page["last_step"], "work was lost though there was time to save it"


@pytest.mark.prove
def test_what_another_attempt_cannot_help_is_not_retried(cluster: Cluster) -> None:
    pod = cluster.pod(1, "bug", inputs="inputs", PYTHONPATH=str(broken(cluster.workdir / "broken")))
    output = finish(pod)
    error = cluster.error("bug").error
    assert error.kind == error.NON_RECOVERABLE, output
    assert "a bug in the step" in error.message


def broken(directory: Path) -> Path:
    """A directory that, on the path of a process, makes its first training step raise."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tasks.train.loop.train_loop':\n"
        "            from tasks.train import step\n"
        "            def train_step(*arguments):\n"
        "                raise ZeroDivisionError('a bug in the step')\n"
        "            step.train_step = train_step\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    return directory


@pytest.mark.parametrize(
    ("nodes", "variables", "message"),
    [
        (2, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, "PET_NNODES=1, but profile 'pods2' says 2"),
        (2, {}, "outside a PyTorchJob"),
        (1, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4, but profile 'pods1' says 1"),
    ],
)
def test_a_pod_that_disagrees_with_its_profile_refuses_to_start(
    cluster: Cluster, nodes: int, variables: dict[str, str], message: str
) -> None:
    name = f"refused-{nodes}-{len(variables)}"
    pod = cluster.pod(nodes, name, **variables)
    finish(pod)
    error = cluster.error(name).error
    assert message in error.message
    assert error.kind == error.NON_RECOVERABLE
    assert not [key for key in cluster.keys(name) if not key.endswith("error.pb") and "deck" not in key]
