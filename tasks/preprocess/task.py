"""The door of preprocess."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import StructuredDataset, current_context, map_task, task
from flytekit.types.directory import FlyteDirectory

from tasks.artifacts.format import Artifact
from tasks.artifacts.store import Store
from tasks.artifacts.versions import code_version
from tasks.flyte.metadata import on
from tasks.flyte.stage import STORE, ArtifactDirectory, Made, door, local_path, run_stage, runs_locally
from tasks.hardware.profile import current_profile
from tasks.preprocess.config import DataConfig
from tasks.settings import to_dict
from tasks.storage import S3


@task(**on("fingerprint"))
@door
def fingerprint(data: str = "", target: str = "", config: DataConfig = DataConfig()) -> str:  # noqa: B008
    """What identifies the raw data right now. Never cached: new bytes behind the same name are new work."""
    from tasks.preprocess.incremental import fingerprint_earlier
    from tasks.preprocess.read.fingerprint import fingerprint_source

    return fingerprint_source(data, target) + fingerprint_earlier(config.earlier)


@task(**on("fingerprint"))
@door
def address_of(dataset: StructuredDataset) -> str:
    """Where the Parquet of a dataset lies, which an upstream task returned as it is or as a DataFrame."""
    from tasks.preprocess.read.structured_dataset import parquet_address

    written = dataset.literal
    assert written is not None, "flytekit hands a dataset over with its literal"
    return parquet_address(written.uri, written.metadata.structured_dataset_type.format)


@task(**on("prepare", besides=("data",)))
@door
def prepare(data: str, target: str, config: DataConfig, source: str) -> Made:
    """Make the prepared data; ``source`` is the fingerprint of what ``data`` names, and stands for it: the same bytes
    at another address are no new work."""

    def make(directory: Path, key: str) -> Artifact:
        from tasks.preprocess import engine
        from tasks.preprocess.pool.workers import workers_for

        kept = Store(STORE).checkpoints("prepare", key) if runs_locally() else None
        by = made_by(target, config, source)
        return engine.prepare(directory, data, target, config, by, workers_for(data), kept)

    return run_stage("prepare", {"target": target, "config": config, "source": source}, make)


def made_by(target: str, config: DataConfig, source: str) -> dict[str, Any]:
    return {"config": to_dict(config), "code": code_version("prepare"), "source": source, "target": target}


# On several pods

#: Shares of the work for each pod that the profile gives: small ones lose less with a pod and end at the same time.
SHARES_OF_A_POD = 4


class Opened(NamedTuple):
    """An opened table, its shares, and the spool of each of them."""

    table: ArtifactDirectory
    shares: list[ArtifactDirectory]
    spools: list[ArtifactDirectory]


class Fitted(NamedTuple):
    """What was fitted on all shares, the plan of what is left to do, and the numbers of its partitions."""

    fitted: ArtifactDirectory
    plan: ArtifactDirectory
    partitions: list[int]


@task(**on("prepare"))
@door
def open_texts(data: str, target: str, config: DataConfig, source: str, number: int) -> list[ArtifactDirectory]:
    """Cut files of text, which ``source`` identifies, into at most ``number`` shares; other data is one empty share."""
    from tasks.preprocess.cluster import csv_parsing
    from tasks.preprocess.cluster.request import TableRequest

    request = TableRequest(data, target, config, source)
    return [handed(share) for share in csv_parsing.open_texts(request, number, part("texts"))]


@task(**on("prepare"))
@door
def parse_share(share: ArtifactDirectory) -> ArtifactDirectory:
    """Make the files of one share columnar."""
    from tasks.preprocess.cluster import csv_parsing

    parsed = part("parsed")
    csv_parsing.parse_share(local_path(share), parsed)
    return handed(parsed)


@task(**on("prepare"))
@door
def open_shares(
    data: str, target: str, config: DataConfig, source: str, number: int, parsed: list[ArtifactDirectory]
) -> Opened:
    """Open the table, of which text is ``parsed``, and cut the work into at most ``number`` shares."""
    from tasks.preprocess.cluster import exchange, shares
    from tasks.preprocess.cluster.request import TableRequest

    request = TableRequest(data, target, config, source)
    summaries = [inner(each, exchange.SUMMARY) for each in parsed]
    opened = shares.open_shares(request, number, summaries, part("opened"))
    spools = [handed(each) for each in opened.spools]
    return Opened(handed(opened.table), [handed(each) for each in opened.shares], spools or parsed)


@task(**on("prepare"))
@door
def scan_share(share: ArtifactDirectory, spool: ArtifactDirectory) -> ArtifactDirectory:
    """The first pass over one share."""
    from tasks.preprocess.cluster import shares

    scanned = part("scanned")
    shares.scan_share(local_path(share), local_path(spool), scanned)
    return handed(scanned)


@task(**on("prepare"))
@door
def fit_shares(table: ArtifactDirectory, scanned: list[ArtifactDirectory], number: int) -> Fitted:
    """Fit on what was found in all shares, and plan to merge in at most ``number`` partitions."""
    from tasks.preprocess.cluster import shares

    fitted, plan = part("fitted"), part("plan")
    partitions = shares.fit_shares(local_path(table), [local_path(each) for each in scanned], number, fitted, plan)
    return Fitted(handed(fitted), handed(plan), list(range(partitions)))


@task(**on("prepare"))
@door
def encode_share(
    share: ArtifactDirectory, spool: ArtifactDirectory, scanned: ArtifactDirectory, plan: ArtifactDirectory
) -> ArtifactDirectory:
    """The second pass over one share."""
    from tasks.preprocess.cluster import shares

    encoded = part("encoded")
    shares.encode_share(local_path(share), local_path(spool), local_path(scanned), local_path(plan), encoded)
    return handed(encoded)


@task(**on("prepare"))
@door
def merge_partition(partition: int, plan: ArtifactDirectory, encoded: list[ArtifactDirectory]) -> ArtifactDirectory:
    """Merge some parts of the prepared data, of which every share has a piece."""
    from tasks.preprocess.cluster import merge_partitions

    merged, name = part("merged"), merge_partitions.directory_of(partition)
    merge_partitions.merge_partition(partition, local_path(plan), [inner(each, name) for each in encoded], merged)
    return handed(merged)


@task(**on("prepare"))
@door
def assemble(
    data: str,
    target: str,
    config: DataConfig,
    source: str,
    fitted: ArtifactDirectory,
    merged: list[ArtifactDirectory],
) -> Made:
    """Put together what was merged: the same bytes, from the same inputs, as of :func:`prepare`.

    Rows that lie on S3 are copied there, the rest of the artifact is uploaded beside them; from another store rows come
    through this pod.
    """
    from tasks.preprocess.cluster import exchange, merge_partitions
    from tasks.preprocess.cluster.request import TableRequest

    addresses = [str(each.remote_source or "") for each in merged]
    home = str(FlyteDirectory.new_remote().path) if all(address.startswith(S3) for address in addresses) else ""

    def make(directory: Path, _: str) -> None:
        if home:
            parts = [
                merge_partitions.s3_parts(inner(each, exchange.SUMMARY), str(each.remote_source), home)
                for each in merged
            ]
        else:
            parts = [merge_partitions.local_parts(local_path(each)) for each in merged]
        merge_partitions.assemble(
            directory,
            TableRequest(data, target, config, source),
            made_by(target, config, source),
            local_path(fitted),
            [one for partition in parts for one in partition],
            home,
        )

    made = run_stage("prepare", {"target": target, "config": config, "source": source}, make)
    return Made(FlyteDirectory(made.artifact.path, remote_directory=home), made.run) if home else made


def prepare_data(data: Any, target: Any, config: Any, source: Any) -> Any:
    """The part of a workflow that makes the prepared data: one task, or as many pods as the profile gives it nodes.

    ``config`` is the workflow's, with a section ``data``: flytekit cannot resolve one promise of a section twice.
    """
    pods = current_profile().placement("prepare").nodes
    if pods == 1:
        return prepare(data=data, target=target, config=config.data, source=source)
    # All or nothing: without one share the data would be other data.
    spread = partial(map_task, concurrency=pods, min_success_ratio=1.0)
    number = SHARES_OF_A_POD * pods
    texts = open_texts(data=data, target=target, config=config.data, source=source, number=number)
    parsed = spread(parse_share)(share=texts)
    opened = open_shares(data=data, target=target, config=config.data, source=source, number=number, parsed=parsed)
    scanned = spread(scan_share)(share=opened.shares, spool=opened.spools)
    fitted = fit_shares(table=opened.table, scanned=scanned, number=number)
    encode = spread(partial(encode_share, plan=fitted.plan))
    encoded = encode(share=opened.shares, spool=opened.spools, scanned=scanned)
    merge = spread(partial(merge_partition, plan=fitted.plan, encoded=encoded))
    merged = merge(partition=fitted.partitions)
    return assemble(
        data=data,
        target=target,
        config=config.data,
        source=source,
        fitted=fitted.fitted,
        merged=merged,
    )


def part(name: str) -> Path:
    """A fresh place for an output of this task."""
    root = Path(current_context().working_directory)
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root)) / name


def handed(directory: Path) -> FlyteDirectory:
    return FlyteDirectory(str(directory.absolute()))


def inner(directory: FlyteDirectory, name: str) -> Path:
    """A directory in the output of another task; it is downloaded without the others."""
    if not directory.remote_source:
        return Path(directory.path) / name
    return local_path(FlyteDirectory.from_source(f"{directory.remote_source}/{name}"))
