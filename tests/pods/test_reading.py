"""Reads of prepared data: pods of the stages after training request from S3 only the files that they read."""

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.rendering import primary_container, rendered, values_of
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.format import MANIFEST, Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND, SPLITS, PreparedData
from slipstream.shared.source.config import DataConfig
from slipstream.shared.stages import StageRun
from tests.support.faulty_s3 import FaultyS3
from tests.support.tables import table_text
from tests.support.toys import untrained

BLOCK_ROWS = 16


@pytest.fixture(scope="module")
def packaged(package_for: Callable[[str], RegistrationArchive]) -> RegistrationArchive:
    return package_for("local")


@pytest.fixture
def bucket(store: FaultyS3) -> S3Bucket:
    return S3Bucket(store.url, f"reading-{uuid.uuid4().hex}")


@pytest.fixture
def prepared(bucket: S3Bucket, tmp_path: Path) -> PreparedData:
    """Prepared data of many small blocks, here and on S3."""
    (tmp_path / "table.csv").write_text(table_text(3000))
    whole = prepare(tmp_path / "whole", str(tmp_path / "table.csv"), "y", DataConfig(), {})
    itemsize = PreparedData.open(whole.directory).signature.record.itemsize
    writer = ArtifactWriter(tmp_path / "prepared")
    for name in whole.files:
        with writer.create(name, BLOCK_ROWS * itemsize) if name.endswith(".rows") else writer.create(name) as file:
            file.write(whole.read_bytes(name))
    upload(writer.finish(KIND, {}), bucket, "prepared")
    return PreparedData.open(tmp_path / "prepared")


def upload(artifact: Artifact, bucket: S3Bucket, prefix: str) -> None:
    for name in (*artifact.files, MANIFEST):
        bucket.write(f"{prefix}/{name}", artifact.path(name).read_bytes())


def asked(store: FaultyS3, bucket: S3Bucket, prefix: str) -> dict[str, int]:
    """The bytes that were asked for of each split's rows; a request for a whole file counts as -1."""
    found: dict[str, int] = {}
    for request in store.requests:
        if match := re.match(rf"GET /{bucket.name}/{prefix}/(\w+)-\d+\.rows\S*(?: bytes=(\d+)-(\d+))?$", request):
            split, first, last = match.groups()
            found[split] = -1 if first is None else found.get(split, 0) + int(last) - int(first) + 1
    return found


def run_pod(
    packaged: RegistrationArchive, bucket: S3Bucket, task: str, workdir: Path, **inputs: tuple[Any, type]
) -> None:
    """One pod of ``task``; what it hands on lies below its name in the bucket."""
    context = FlyteContextManager.current_context()
    literals = {
        name: TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()
        for name, (value, kind) in inputs.items()
    }
    bucket.write("inputs.pb", LiteralMap(literals=literals).SerializeToString())
    container = primary_container(packaged.tasks[task])
    command = rendered(container.command, values_of(bucket.uri("inputs.pb"), bucket.uri("made")))
    environment = {**bucket.environment, "FLYTE_INTERNAL_EXECUTION_ID": "reading", **container.environment}
    said = PodProcess.start("reading", command, environment, workdir / "pod").finish()
    assert "made/outputs.pb" in bucket.keys("made"), said


@pytest.mark.prove
def test_a_pod_of_the_report_asks_for_no_rows(
    packaged: RegistrationArchive, prepared: PreparedData, store: FaultyS3, bucket: S3Bucket, tmp_path: Path
) -> None:
    store.requests.clear()
    run_pod(
        packaged,
        bucket,
        "tasks.report.report_data",
        tmp_path,
        prepared=(FlyteDirectory(bucket.uri("prepared"), remote_directory=False), FlyteDirectory),
        stages=([StageRun("prepare", 1.0, False)], list[StageRun]),
    )
    assert any("/prepared/card.json" in request for request in store.requests)
    assert asked(store, bucket, "prepared") == {}


@pytest.mark.prove
@pytest.mark.parametrize("task", ["export", "evaluate"])
def test_a_pod_asks_for_every_block_that_it_reads_once(
    task: str, packaged: RegistrationArchive, prepared: PreparedData, store: FaultyS3, bucket: S3Bucket, tmp_path: Path
) -> None:
    upload(untrained(tmp_path / "trained", prepared), bucket, "trained")
    store.requests.clear()
    run_pod(
        packaged,
        bucket,
        f"tasks.{task}.{task}",
        tmp_path,
        trained=(FlyteDirectory(bucket.uri("trained"), remote_directory=False), FlyteDirectory),
        prepared=(FlyteDirectory(bucket.uri("prepared"), remote_directory=False), FlyteDirectory),
        **({"config": (ExportConfig(calibration_rows=50, seconds=2.0), ExportConfig)} if task == "export" else {}),
    )
    # Samples for calibration, distributions and the baseline overlap; together they have all rows of so small splits.
    rows = {split: prepared.segment_rows(split)[0] for split in SPLITS}
    assert asked(store, bucket, "prepared") == {
        split: count * prepared.signature.record.itemsize for split, count in rows.items()
    }
