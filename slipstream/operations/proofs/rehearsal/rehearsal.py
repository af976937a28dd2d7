"""Main workflow of a profile on a rehearsed cluster: executions that share a cache and a bucket."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from flyteidl.core.literals_pb2 import Literal

from slipstream.config import RunConfig
from slipstream.operations.doctor.archive import RegistrationArchive, read_package
from slipstream.operations.proofs.processes import run_pyflyte
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket, WatchedS3, watched_s3
from slipstream.operations.proofs.rehearsal.catalog import Catalog
from slipstream.operations.proofs.rehearsal.kills import Kills
from slipstream.operations.proofs.rehearsal.propeller import Execution
from slipstream.operations.proofs.rehearsal.record import ExecutionRecord
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.versions import installed_constraints
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import CHOICE, RESOLVED, VERSIONS, Profile
from slipstream.shared.settings import Settings, to_dict
from slipstream.shared.source.config import DataConfig

WORKFLOW = "workflows.training.train_and_export"
TARGET = "y"
#: Seconds of work in which every stage still does all that it does: checkpoints, calibration, several sizes.
CONFIG = RunConfig(
    data=DataConfig(memory=0.5),
    model=ModelConfig(arguments={"hidden": [16]}),
    training=TrainingConfig(epochs=3, batch_size=32, patience=0, checkpoint_every=4),
    export=ExportConfig(calibration_rows=32, seconds=2.0),
    collectives=CollectivesConfig(operations=["all_reduce"], smallest=1024, largest=4096, budget=0.01, launches=1),
)
#: Image named in the package; a rehearsed pod runs this machine's interpreter instead.
IMAGE = "registry.example/slipstream:rehearsal"
#: Endpoint of the Flyte that packaging must not ask.
NO_FLYTE = "127.0.0.1:1"


@dataclass
class Rehearsal:
    """Execution of a package on a simulated cluster."""

    package: RegistrationArchive
    s3: WatchedS3
    bucket: S3Bucket
    workdir: Path
    catalog: Catalog = field(default_factory=Catalog)

    def execution(
        self,
        name: str,
        *,
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
        kills: Kills | None = None,
        **settings: Any,
    ) -> Execution:
        """Return an execution; ``seed`` decides the order of maps. Only one at a time can have kills.

        ``settings`` are further arguments of :class:`Execution`.
        """
        kills = kills or Kills()
        workdir = self.workdir / name
        workdir.mkdir()
        self.s3.watcher = kills.asked
        draw = random.Random(seed)
        record = ExecutionRecord(say)
        return Execution(name, self.package, self.bucket, workdir, self.catalog, record, draw, kills, **settings)

    def forget(self) -> None:
        """Empty the cache."""
        self.catalog = Catalog()


@contextmanager
def rehearsal(workdir: Path, profile: Profile) -> Iterator[Rehearsal]:
    """Package the workflows for ``profile`` and put a cluster below ``workdir``."""
    package = package_workflows(workdir, profile)
    with watched_s3() as s3:
        # moto forgets nothing as long as its process lives.
        bucket = S3Bucket(s3.url, f"rehearsal-{np.random.default_rng().integers(2**62):x}", patient=False)
        yield Rehearsal(package, s3, bucket, workdir)


def package_workflows(directory: Path, profile: Profile) -> RegistrationArchive:
    """Package the clone's workflows for ``profile`` and return the package."""
    archive, installed = str(directory / "flyte.tgz"), directory / "versions.txt"
    installed.write_text(installed_constraints(), encoding="utf-8")  # the pods are processes of this environment
    resolved = {**json.loads(profile.to_json()), VERSIONS: profile.versions or str(installed)}
    variables = {"FLYTE_PLATFORM_URL": NO_FLYTE, CHOICE: profile.name, RESOLVED: json.dumps(resolved)}
    words = ["--pkgs", "workflows", "package", "--image", IMAGE, "--force", "--output", archive]
    run_pyflyte(words, "package", variables)
    return read_package(Path(archive))


# Inputs


def literal(value: str | Settings) -> Literal:
    """Return the literal that Flyte's clients make of a text or of settings."""
    made = Literal()
    if isinstance(value, str):
        made.scalar.primitive.string_value = value
    else:
        made.scalar.binary.value = msgpack.packb(to_dict(value))
        made.scalar.binary.tag = "msgpack"
    return made


def write_table(bucket: S3Bucket, files: int = 3, rows: int = 100) -> str:
    """Write a small table of several CSV files and return its address."""
    draw = np.random.default_rng(0)
    for file in range(files):
        numbers, cities = draw.normal(5, 2, rows), draw.choice(["Oslo", "Rome", "Lima"], rows)
        labels = np.where(numbers > 5, "yes", "no")
        lines = [f"{n:.6f},{c},{y}" for n, c, y in zip(numbers, cities, labels, strict=True)]
        bucket.write(f"data/{file}.csv", ("number,city,y\n" + "\n".join(lines) + "\n").encode())
    return bucket.uri("data/")


def model_of(execution: Execution, into: Path) -> Path:
    """Download the trained model of an execution and return its directory."""
    (node,) = {attempt.node for attempt in execution.record.attempts if attempt.task == "train"}
    return execution.bucket.download(execution.outputs[node]["artifact"].scalar.blob.uri, into)


# A profile that fits the CPUs of one machine

#: Settings of a placement that a rehearsal keeps: retries, spot capacity, and the variables and limits of pods.
KEPT = ("interruptible", "retries", "restarts", "timeout_minutes", "tolerations", "data_cache_gib")
MOST_PODS = 2


def shrunk(profile: Profile) -> Profile:
    """Return the profile with at most two pods of one process per stage, on any hardware."""
    return replace(
        profile,
        default=shrunk_placement(profile.default),
        stages={stage: shrunk_placement(place) for stage, place in profile.stages.items()},
    )


def shrunk_placement(place: Placement) -> Placement:
    kept = {name: getattr(place, name) for name in KEPT}
    return Placement(**kept, nodes=min(place.nodes, MOST_PODS), processes=1)


def difference(whole: Profile, small: Profile) -> str:
    """Return one line with the changes of a shrunk profile."""
    stages = [
        f"{stage} from {places[0]} to {places[1]}"
        for stage in sorted(whole.stages)
        if len(set(places := [shape(each.placement(stage)) for each in (whole, small)])) > 1
    ]
    what = "; ".join([*stages, "no hardware asked for"])
    return f"profile {whole.name}, shrunk to this machine: {what}"


def shape(place: Placement) -> str:
    gpus = f" with {place.gpu} GPUs" if place.gpu != "0" else ""
    return f"{place.nodes} {'pod' if place.nodes == 1 else 'pods'} of {place.processes}{gpus}"
