"""A table prepared by several pods on a rehearsed cluster: the packaged workflow, step by step through S3."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from flyteidl.core.literals_pb2 import Literal

from slipstream.config import RunConfig
from slipstream.operations.proofs.rehearsal.propeller import Execution
from slipstream.operations.proofs.rehearsal.rehearsal import Rehearsal, literal, rehearsal
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.profiles.profile import parse_profile
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tasks.prepare import made_by

PROFILE = {"stages": {"prepare": {"nodes": 2, "retries": 3}}}
CONFIG = DataConfig(id="id")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("place"), parse_profile("two", PROFILE)) as made:
        yield made


def made_by_pods(execution: Execution, into: Path) -> Artifact:
    (node,) = {attempt.node for attempt in execution.record.attempts if attempt.task == "assemble"}
    execution.bucket.download(execution.outputs[node]["artifact"].scalar.blob.uri, into)
    return Artifact.open(into, "prepare").check_sha256()


def pods_of(execution: Execution, task: str) -> int:
    return len({attempt.node for attempt in execution.record.attempts if attempt.task == task})


@pytest.mark.prove
@pytest.mark.parametrize(("format", "earlier"), [("parquet", False), ("csv", False), ("csv", True)])
def test_pods_make_the_bytes_that_one_machine_makes(
    here: Rehearsal, tmp_path: Path, format: str, earlier: bool
) -> None:
    draw, bucket, name = np.random.default_rng(0), here.bucket, f"{format}-{earlier}".lower()
    table = pa.table(
        {
            "id": np.arange(900),
            "x": draw.normal(size=900),
            "c": draw.choice(list("ab"), 900),
            "y": draw.integers(0, 2, 900),
        }
    )
    if format == "parquet":
        pq.write_table(table, tmp_path / "0.parquet", row_group_size=300)
    else:
        for file in range(3):
            pacsv.write_csv(table.slice(300 * file, 300), tmp_path / f"{file}.csv")
    for path in tmp_path.glob(f"*.{format}"):
        bucket.write(f"{name}/data/{path.name}", path.read_bytes())
    data, config = bucket.uri(f"{name}/data/"), CONFIG
    if earlier:
        for path in prepare(tmp_path / "first", f"{data}0.csv", "y", CONFIG, {}).directory.iterdir():
            bucket.write(f"{name}/first/{path.name}", path.read_bytes())
        config = replace(CONFIG, earlier=bucket.uri(f"{name}/first"))

    inputs = {"data": literal(data), "target": literal("y"), "config": literal(RunConfig(data=config))}
    execution = here.execution(name)
    execution.run("workflows.training.prepare", inputs)
    shares = 3 - earlier
    assert [pods_of(execution, task) for task in ("scan_share", "encode_share")] == [shares, shares], (
        "one share for each row group or new file"
    )
    made = made_by_pods(execution, tmp_path / "made")
    source = made.made_by["source"]
    if not earlier:
        assert source == fingerprint_source(list_source(data), "y")
    alone = prepare(tmp_path / "alone", data, "y", config, made_by("y", config, source))
    assert made.fingerprint == alone.fingerprint


@pytest.mark.prove
def test_pods_take_the_dataset_that_another_wrote(here: Rehearsal, tmp_path: Path) -> None:
    """What flytekit makes of a DataFrame that a task returns: Parquet under a name without extension."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": np.arange(90.0), "y": np.arange(90) % 2}), sink)
    here.bucket.write("upstream/raw/00000", sink.getvalue().to_pybytes())
    written = Literal()
    written.scalar.structured_dataset.uri = here.bucket.uri("upstream/raw")
    written.scalar.structured_dataset.metadata.structured_dataset_type.format = "parquet"
    execution = here.execution("dataset")
    execution.run("workflows.training.prepare_dataset", {"dataset": written, "target": literal("y")})
    made = made_by_pods(execution, tmp_path / "made")
    source = fingerprint_source(list_source(here.bucket.uri("upstream/raw")), "y")
    alone = prepare(
        tmp_path / "alone", here.bucket.uri("upstream/raw"), "y", DataConfig(), made_by("y", DataConfig(), source)
    )
    assert made.fingerprint == alone.fingerprint
