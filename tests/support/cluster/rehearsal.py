"""The main workflow on a rehearsed cluster: the inputs, and executions of one package that share cache and bucket."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flyteidl.core.literals_pb2 import Literal
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from slipstream.collectives.config import CollectivesConfig
from slipstream.config import RunConfig
from slipstream.doctor.archive import Package
from slipstream.export.config import ExportConfig
from slipstream.models.config import ModelConfig
from slipstream.profiles.profile import RESOLVED, Profile
from slipstream.source.config import DataConfig
from slipstream.train.config import TrainingConfig
from tests.support.cluster.bucket import Bucket
from tests.support.cluster.kills import Kills
from tests.support.cluster.propeller import Execution
from tests.support.cluster.record import Record
from tests.support.cluster.workflow.cache_keys import Catalog
from tests.support.faulty_s3 import FaultyS3, faulty_s3
from tests.support.package import package

WORKFLOW = "workflows.training.train_and_export"
TARGET = "y"
#: Seconds of work, and yet every stage does all that it does: checkpoints, calibration, several sizes.
CONFIG = RunConfig(
    data=DataConfig(memory=0.5),
    model=ModelConfig(arguments={"hidden": [16]}),
    training=TrainingConfig(epochs=3, batch_size=32, patience=0, checkpoint_every=4),
    export=ExportConfig(calibration_rows=32, seconds=2.0),
    collectives=CollectivesConfig(operations=["all_reduce"], smallest=1024, largest=4096, budget=0.01, launches=1),
)


@dataclass
class Rehearsal:
    """One package on one cluster."""

    package: Package
    server: FaultyS3
    bucket: Bucket
    workdir: Path
    catalog: Catalog = field(default_factory=Catalog)

    def execution(
        self, name: str, *, seed: int = 0, say: Callable[[str], None] = lambda line: None, kills: Kills | None = None
    ) -> Execution:
        """Return an execution to run; ``seed`` decides the order of maps. Only one at a time can have kills."""
        kills = kills or Kills()
        workdir = self.workdir / name
        workdir.mkdir()
        self.server.watcher = kills.asked
        draw = random.Random(seed)
        return Execution(name, self.package, self.bucket, workdir, self.catalog, Record(say), draw, kills)

    def forget(self) -> None:
        """Nothing is cached any more."""
        self.catalog = Catalog()


@contextmanager
def rehearsal(workdir: Path, profile: Profile) -> Iterator[Rehearsal]:
    """Package for ``profile`` and put a cluster below ``workdir``."""
    made = package(workdir, profile.name, **{RESOLVED: profile.to_json()})
    with faulty_s3() as server:
        # moto forgets nothing as long as its process lives.
        bucket = Bucket(server.url, f"rehearsal-{np.random.default_rng().integers(2**62):x}", patient=False)
        yield Rehearsal(made, server, bucket, workdir)


def literal(value: Any) -> Literal:
    context, kind = FlyteContextManager.current_context(), type(value)
    return TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()


def table(bucket: Bucket, files: int = 3, rows: int = 100) -> str:
    """The address of a small table of several CSV files."""
    draw = np.random.default_rng(0)
    for file in range(files):
        numbers, cities = draw.normal(5, 2, rows), draw.choice(["Oslo", "Rome", "Lima"], rows)
        labels = np.where(numbers > 5, "yes", "no")
        lines = [f"{n:.6f},{c},{y}" for n, c, y in zip(numbers, cities, labels, strict=True)]
        bucket.write(f"data/{file}.csv", ("number,city,y\n" + "\n".join(lines) + "\n").encode())
    return bucket.uri("data/")


def model_of(execution: Execution, into: Path) -> Path:
    """The trained model that an execution handed on, downloaded."""
    (node,) = {attempt.node for attempt in execution.record.attempts if attempt.task == "train"}
    return execution.bucket.download(execution.outputs[node]["artifact"].scalar.blob.uri, into)
