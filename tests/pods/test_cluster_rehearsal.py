"""A rehearsal of a table prepared by several pods: the packaged commands, from step to step through S3.

As in :mod:`tests.pods.test_training_rehearsal` nothing of a cluster is imitated but what it does for a pod: for a map
task, it starts one for each element of the list, which finds its place in ``FLYTE_K8S_ARRAY_INDEX``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from moto.server import ThreadedMotoServer

from tasks.artifacts.format import Artifact
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.preprocess.read.files import list_source
from tasks.preprocess.read.fingerprint import fingerprint_source
from tasks.preprocess.task import made_by
from tasks.storage.s3 import client_of
from tests.support.package import Package, package

PROFILE = "[stages.prepare]\nnodes = 2\nretries = 3\n"
CONFIG = DataConfig(id="id")
TASKS = "tasks.preprocess.task"


class Pods:
    """Runs the packaged tasks, each pod a process in a directory of its own with inputs and outputs on S3."""

    def __init__(self, workdir: Path, endpoint: str, packaged: Package) -> None:
        self.workdir = workdir
        self.packaged = packaged
        self.store = {
            "FLYTE_AWS_ENDPOINT": endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": "testing",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        self.s3 = boto3.client("s3", endpoint_url=endpoint, **keys)
        self.bucket = workdir.name.replace("_", "-")  # moto's server forgets nothing
        self.s3.create_bucket(Bucket=self.bucket)

    def run(self, task: str, index: int | None = None, **inputs: Literal) -> dict[str, Literal]:
        """The outputs of one pod; ``index`` is its place in a map task."""
        name = task if index is None else f"{task}-{index}"
        self.s3.put_object(
            Bucket=self.bucket, Key=f"{name}/inputs.pb", Body=LiteralMap(literals=inputs).SerializeToString()
        )
        if index is None:
            template = self.packaged.tasks[f"{TASKS}.{task}"]
        else:
            (template,) = [t for n, t in self.packaged.tasks.items() if n.startswith(f"{TASKS}.map_{task}_")]
        fills = {
            "input": f"s3://{self.bucket}/{name}/inputs.pb",
            "outputPrefix": f"s3://{self.bucket}/{name}/outputs",
            "rawOutputDataPrefix": f"s3://{self.bucket}/{name}/raw",
            "checkpointOutputPrefix": f"s3://{self.bucket}/{name}/checkpoints",
            "prevCheckpointPrefix": '""',
        }
        command = [re.sub(r"\{\{\.(\w+)\}\}", lambda m: fills[m[1]], part) for part in template.container.args]
        place = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX", "FLYTE_K8S_ARRAY_INDEX": str(index)}
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.workdir),
            "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-"),
            **self.store,
            **{pair.key: pair.value for pair in template.container.env},
            **({} if index is None else place),
        }
        (self.workdir / name).mkdir()
        pod = subprocess.run(
            command,
            cwd=self.workdir / name,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
        )
        keys = [o["Key"] for o in self.s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{name}/outputs")["Contents"]]
        assert pod.returncode == 0 and f"{name}/outputs/outputs.pb" in keys, pod.stdout
        body = self.s3.get_object(Bucket=self.bucket, Key=f"{name}/outputs/outputs.pb")["Body"].read()
        return dict(LiteralMap.FromString(body).literals)

    def map(self, task: str, number: int, **inputs: Literal) -> Literal:
        """The collected outputs of all pods of a map task."""
        made = Literal()
        for index in range(number):
            made.collection.literals.append(self.run(task, index, **inputs)["o0"])
        return made


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    (tmp_path / "two.toml").write_text(PROFILE)
    yield Pods(tmp_path, f"http://{host}:{port}", package(tmp_path, str(tmp_path / "two.toml")))
    server.stop()


def literal(value: Any) -> Literal:
    context, kind = FlyteContextManager.current_context(), type(value)
    return TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()


@pytest.mark.prove
@pytest.mark.parametrize(("format", "earlier"), [("parquet", False), ("csv", False), ("csv", True)])
def test_pods_make_the_bytes_that_one_machine_makes(
    pods: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, earlier: bool
) -> None:
    draw = np.random.default_rng(0)
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
        pods.s3.put_object(Bucket=pods.bucket, Key=f"data/{path.name}", Body=path.read_bytes())
    client_of.cache_clear()  # another test had another server
    for name, value in pods.store.items():
        monkeypatch.setenv(name, value)
    data = f"s3://{pods.bucket}/data/"
    source = fingerprint_source(list_source(data), "y")
    config = CONFIG
    if earlier:
        first = prepare(tmp_path / "first", f"{data}0.csv", "y", CONFIG, {})
        for path in first.directory.iterdir():
            pods.s3.upload_file(str(path), pods.bucket, f"first/{path.name}")
        config = replace(CONFIG, earlier=f"s3://{pods.bucket}/first")
    alone = prepare(tmp_path / "alone", data, "y", config, made_by("y", config, source))

    asked = {"data": literal(data), "target": literal("y"), "config": literal(config)}
    found = pods.run("list_data", **asked)
    if not earlier:
        assert found["source"].scalar.primitive.string_value == source
    raw = {"listing": found["listing"], "target": literal("y"), "config": literal(config), "source": literal(source)}
    number = literal(8)
    texts = pods.run("open_texts", **raw, number=number)["o0"]
    parsed = pods.map("parse_share", len(texts.collection.literals), share=texts)
    opened = pods.run("open_shares", **raw, number=number, parsed=parsed)
    shares = len(opened["shares"].collection.literals)
    assert shares == 3 - earlier, "one share for each row group or new file"
    units = {"share": opened["shares"], "spool": opened["spools"]}
    if format == "csv":
        uris = [[blob.scalar.blob.uri for blob in of.collection.literals] for of in (opened["spools"], parsed)]
        assert uris[0] == uris[1], "what was parsed stays where it is"
    scanned = pods.map("scan_share", shares, **units)
    fitted = pods.run("fit_shares", table=opened["table"], scanned=scanned, number=number)
    encoded = pods.map("encode_share", shares, **units, scanned=scanned, plan=fitted["plan"])
    partitions = len(fitted["partitions"].collection.literals)
    merged = pods.map(
        "merge_partition", partitions, partition=fitted["partitions"], plan=fitted["plan"], encoded=encoded
    )
    made = pods.run("assemble", **raw, fitted=fitted["fitted"], merged=merged)

    prefix = made["artifact"].scalar.blob.uri.removeprefix(f"s3://{pods.bucket}/")
    for entry in pods.s3.list_objects_v2(Bucket=pods.bucket, Prefix=prefix)["Contents"]:
        path = tmp_path / "made" / entry["Key"].removeprefix(prefix).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pods.s3.get_object(Bucket=pods.bucket, Key=entry["Key"])["Body"].read())
    made = Artifact.open(tmp_path / "made", "prepare").check_sha256()
    assert made.fingerprint == alone.fingerprint


@pytest.mark.prove
def test_a_pod_takes_the_dataset_that_another_wrote(pods: Pods) -> None:
    """What flytekit makes of a DataFrame that a task returns: Parquet under a name without extension."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": np.arange(90.0), "y": np.arange(90) % 2}), sink)
    pods.s3.put_object(Bucket=pods.bucket, Key="upstream/raw/00000", Body=sink.getvalue().to_pybytes())
    written = Literal()
    written.scalar.structured_dataset.uri = f"s3://{pods.bucket}/upstream/raw"
    written.scalar.structured_dataset.metadata.structured_dataset_type.format = "parquet"
    data = pods.run("address_of", dataset=written)["o0"]
    assert data.scalar.primitive.string_value == f"s3://{pods.bucket}/upstream/raw"
    raw = {"data": data, "target": literal("y"), "config": literal(DataConfig())}
    source = pods.run("fingerprint", **raw)["o0"]
    texts = pods.run("open_texts", **raw, source=source, number=literal(2))["o0"]
    parsed = pods.map("parse_share", len(texts.collection.literals), share=texts)
    opened = pods.run("open_shares", **raw, source=source, number=literal(2), parsed=parsed)
    assert len(opened["shares"].collection.literals) == 1
