"""Training as pods: the packaged container command and environment, run against S3 on loopback.

Nothing of a cluster is imitated but what it does for a pod: it fills in the templates of the command, it sets the
``PET_`` variables of a PyTorchJob, and it runs the container. Inputs, outputs and checkpoints are on S3.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.processes import free_port
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, read_outcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.rendering import primary_container, raw_output, rendered, values_of
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import TARGET, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.workspaces import HOMES
from slipstream.shared.models.config import ModelConfig
from tests.support import REPOSITORY
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from tests.support.package import package
from tests.support.processes import forked_workers

TRAIN = "tasks.train.train"
#: By the name of their inputs, tasks that are no training.
TASKS = {"benchmark": "tasks.collectives.benchmark_collectives"}

PROFILE = """
[stages.train]
nodes = {nodes}
processes = {processes}
retries = 3
data_cache_gib = {cache}
[stages.collectives]
nodes = {nodes}
processes = {processes}
"""

#: Code for :func:`python_path`: the first training step raises.
BUG = """
def train_step(*arguments):
    raise ZeroDivisionError('a bug in the step')
from slipstream.pipeline.train.loop import step
step.train_step = train_step
"""


@dataclass(frozen=True)
class Cluster:
    """What the pods of these tests share: S3, the packaged task for each shape of the group, and the inputs."""

    server: FaultyS3
    bucket: S3Bucket
    environment: dict[str, str]
    workdir: Path
    packages: dict[tuple[int, int], RegistrationArchive] = field(default_factory=dict)
    #: That of a scheduler; without one there is room for all.
    admit: Callable[[PodProcess], None] | None = None

    def template(self, nodes: int, processes: int = 1, task: str = TRAIN) -> Any:
        """A distributed task, packaged for ``nodes`` pods of ``processes`` each."""
        if (nodes, processes) not in self.packages:
            profile = self.workdir / f"pods{nodes}.toml"
            # Two pods of one process have no room for all of the 28 KB, so that their rows stream; others download.
            cache = 2.2e-5 if (nodes, processes) == (2, 1) else 1.0
            profile.write_text(PROFILE.format(nodes=nodes, processes=processes, cache=cache))
            self.packages[nodes, processes] = package(self.workdir, str(profile))
        return self.packages[nodes, processes].tasks[task]

    def pod(
        self,
        nodes: int,
        name: str,
        *,
        processes: int = 1,
        number: int = 0,
        attempt: int = 0,
        inputs: str = "inputs",
        beside: str = "",
        **variables: str,
    ) -> PodProcess:
        """Start pod ``number`` of an attempt of a distributed task in the execution ``name``.

        Executions find each other's checkpoints only if their raw outputs have the same base, which another
        execution may have made.
        """
        container = primary_container(self.template(nodes, processes, TASKS.get(inputs, TRAIN)))
        first = beside or name
        base = self.bucket.uri(f"{first}/raw")
        raw, before = (raw_output(base, name, "n0", which) for which in (attempt, attempt - 1))
        place = self.bucket.uri(f"{name}/{attempt}")
        values = values_of(self.bucket.uri(f"{inputs}.pb"), place, raw, before if attempt else "")
        # Flyte names the execution in every pod; the pods of a PyTorchJob find each other by that name.
        execution = {
            "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-"),
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "project",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
            "FLYTE_ATTEMPT_NUMBER": str(attempt),
        }
        return PodProcess.start(
            f"{name}-{attempt}-{number}",
            rendered(container.command, values),
            {**self.environment, **execution, **container.environment, **variables},
            self.workdir / name / f"{attempt}-{number}",
            container.grace_s,
            admit=self.admit,
        )

    def home(self, name: str) -> list[str]:
        """The keys below the home of the training of an execution."""
        return self.bucket.keys(f"{name}/raw/{HOMES}/project/development/")

    def trained(self, name: str, into: Path, attempt: int = 0) -> Path:
        """Download the trained model that an attempt handed on."""
        outputs = self.bucket.message(f"{name}/{attempt}/outputs.pb", LiteralMap)
        assert outputs, "no outputs"
        return self.bucket.download(outputs.literals["artifact"].scalar.blob.uri, into)

    def verdict(self, name: str, attempt: int = 0) -> AttemptOutcome:
        """What propeller reads of an attempt once its pods have ended well."""
        return read_outcome(self.bucket, f"{name}/{attempt}")[0]

    def error(self, name: str, attempt: int = 0) -> ContainerError:
        document = self.bucket.message(f"{name}/{attempt}/error.pb", ErrorDocument)
        assert document, "no error"
        return document.error


def blobs(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that a small model tells apart."""
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
    write_record(writer, "signature.json", signature)
    writer.finish("prepare", {"by": "the rehearsal"})


@contextmanager
def training_cluster(workdir: Path) -> Iterator[Cluster]:
    with faulty_s3() as server:
        # As Flyte configures pods for MinIO; boto3's own variables are not set.
        environment = {f"FLYTE_{name}": value for name, value in CREDENTIALS.items()}
        environment |= {"FLYTE_AWS_ENDPOINT": server.url, "AWS_DEFAULT_REGION": CREDENTIALS["AWS_DEFAULT_REGION"]}
        bucket = S3Bucket(server.url, "training-pods")
        write_inputs(bucket, workdir)
        yield Cluster(server, bucket, environment, workdir)


def write_inputs(bucket: S3Bucket, workdir: Path) -> None:
    """Put prepared data into the bucket, and two sets of inputs: ``inputs``, of 72 steps, and ``endless``."""
    write_prepared(workdir / "prepared")
    for path in (workdir / "prepared").iterdir():
        bucket.write(f"prepared/{path.name}", path.read_bytes())
    context = FlyteContextManager.current_context()
    short = TrainingConfig(epochs=6, batch_size=50, patience=0, checkpoint_every=10)
    endless = TrainingConfig(epochs=20_000, batch_size=50, patience=0, checkpoint_every=10)
    common: dict[str, tuple[Any, type]] = {
        "prepared": (FlyteDirectory(bucket.uri("prepared"), remote_directory=False), FlyteDirectory),
        "model": (ModelConfig(arguments={"hidden": [16]}), ModelConfig),
        "code": ("", str),
    }
    for key, training in {"inputs": short, "endless": endless}.items():
        literals = {
            name: TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()
            for name, (value, kind) in {**common, "training": (training, TrainingConfig)}.items()
        }
        bucket.write(f"{key}.pb", LiteralMap(literals=literals).SerializeToString())


def until_saved(cluster: Cluster, pod: PodProcess, name: str) -> None:
    """Wait until the pod has published a checkpoint."""
    deadline = time.monotonic() + 120
    while not any(key.endswith("/manifest.json") for key in cluster.home(name)):
        assert pod.running and time.monotonic() < deadline, pod.said()
        time.sleep(0.02)


def worker_of(pod: PodProcess) -> int:
    """The process id of the pod's only training process."""
    (worker,) = forked_workers(pod.pid)
    return worker


def pods_of_job(
    cluster: Cluster,
    name: str,
    *,
    processes: int = 1,
    attempt: int = 0,
    inputs: str = "inputs",
    beside: str = "",
    variables: Sequence[dict[str, str]] = ({}, {}),
) -> list[PodProcess]:
    """Both pods of one attempt of a PyTorchJob; ``variables`` are those that one of them has alone."""
    job = {
        "PET_NNODES": "2:2",  # as the operator writes it when the job has an elastic policy
        "PET_NPROC_PER_NODE": str(processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
    }
    return [
        cluster.pod(
            2,
            name,
            processes=processes,
            number=rank,
            attempt=attempt,
            inputs=inputs,
            beside=beside,
            **{"PET_NODE_RANK": str(rank), **job, **own},
        )
        for rank, own in enumerate(variables)
    ]


def python_path(
    directory: Path, code: str, before: str = "slipstream.pipeline.train.loop.train_loop"
) -> dict[str, str]:
    """Variables with which a pod and its workers run ``code`` when they first import the module ``before``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {before!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            exec({code!r}, {{}})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    return {"PYTHONPATH": f"{directory}{os.pathsep}{REPOSITORY}"}
