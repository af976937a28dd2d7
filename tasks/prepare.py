"""Flyte tasks that prepare data in one pod or in several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from flytekit import StructuredDataset, conditional, map_task, task
from flytekit.core.promise import Promise
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import MadePrepared, Part
from slipstream.flyte.metadata import profile_workflow, stage_metadata
from slipstream.flyte.stage import (
    BY_VALUE,
    fresh_directory,
    local_path,
    map_errors,
    output_address,
    output_directory,
    run_stage,
    runs_locally,
)
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.artifacts.workspaces import STORE, ArtifactStore
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.settings import counted_settings
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.dates import dated_address
from slipstream.shared.storage import S3

if TYPE_CHECKING:
    from slipstream.pipeline.prepare.resolve import SourceToPrepare


class Listed(NamedTuple):
    """Listing of the raw data, a fingerprint of its bytes, and the settings.

    ``division`` is how several pods divide the work: "files", "units" or "none". ``texts`` are the shares of text files
    to parse if it is "files".
    """

    listing: Part
    source: str
    division: str
    texts: list[Part]
    data: Annotated[DataConfig, BY_VALUE]


class OpenedDataset(NamedTuple):
    """Address of a dataset, and the configuration without the columns that its type does not declare."""

    data: str
    config: Annotated[RunConfig, BY_VALUE]


@task(**stage_metadata("fingerprint"))
@map_errors
def list_data(data: str, target: str, config: RunConfig) -> Listed:
    """List and fingerprint the raw data, and determine its format.

    Never cached, since the bytes at an address may change.
    """
    return list_and_divide(dated_address("data", data, None), target, config.data)


def list_and_divide(data: str, target: str, config: DataConfig) -> Listed:
    """Return the result of :func:`list_data`, with text files cut into shares if several pods parse them."""
    from slipstream.pipeline.prepare.resolve import resolve_source
    from slipstream.pipeline.prepare.sharded import shares
    from slipstream.shared.artifacts import exchange
    from slipstream.shared.source.documents import list_data
    from slipstream.shared.source.files import files_unchanged
    from slipstream.shared.source.resolved import fingerprint_source

    listing = list_data(data, target, config)
    fingerprint = fingerprint_source(listing, target)
    with files_unchanged(listing.files):
        source = resolve_source(listing, target, config, fingerprint)
    identity = fingerprint + (source.base.fingerprint if source.base else "") + source.tokenizer_digest
    written = exchange.write_part(fresh_directory("listing"), source)
    spread = count_preparing_pods() > 1 and source.division == "files"
    cut = (
        shares.open_texts(source, SHARES_OF_A_POD * count_preparing_pods(), fresh_directory("texts")) if spread else []
    )
    texts = [output_directory(each) for each in cut]
    return Listed(output_directory(written), identity, source.division, texts, config)


def resolved_source(listing: FlyteDirectory) -> SourceToPrepare:
    """Return the resolved source that :func:`list_and_divide` wrote."""
    from slipstream.pipeline.prepare.resolve import SourceToPrepare
    from slipstream.shared.artifacts import exchange

    return exchange.read_part(local_path(listing), SourceToPrepare)


@task(**stage_metadata("fingerprint"))
@map_errors
def open_dataset(dataset: StructuredDataset, target: str, config: RunConfig) -> OpenedDataset:
    """Return the address of a Flyte dataset's Parquet files, from a task that returned a dataset or DataFrame.

    If its type declares columns, as ``StructuredDataset[kwtypes(...)]`` does, the configuration drops all others.
    """
    from slipstream.shared.source.datasets import list_parquet, undeclared_columns

    written = dataset.literal
    assert written is not None, "flytekit hands a dataset over with its literal"
    kind = written.metadata.structured_dataset_type
    listing = list_parquet(written.uri, kind.format)
    if declared := [column.name for column in kind.columns or []]:
        others = undeclared_columns(listing, declared, target, config.data)
        config = replace(config, data=replace(config.data, drop=list(dict.fromkeys([*config.data.drop, *others]))))
    return OpenedDataset(listing.address, config)


@task(**stage_metadata("prepare", besides=("listing",)))
@map_errors
def prepare(listing: Part, target: str, config: DataConfig, source: str) -> MadePrepared:
    """Prepare the data in one pod.

    The cache key has the fingerprint ``source`` instead of the listing, so equal bytes at another address hit the
    cache.
    """

    def make(directory: Path, key: str) -> Artifact:
        from slipstream.pipeline.prepare import engine

        scratch = ArtifactStore(STORE).checkpoints("prepare", key) if runs_locally() else None
        by = made_by(target, config, source)
        return engine.prepare_source(directory, resolved_source(listing), by, scratch=scratch)

    return MadePrepared(*run_stage("prepare", {"target": target, "config": config, "source": source}, make))


def made_by(target: str, config: DataConfig, source: str) -> dict[str, object]:
    return {"config": counted_settings(config), "code": code_version("prepare"), "source": source, "target": target}


# On several pods

#: Number of shares per pod. With small shares, losing a pod repeats less work and load is balanced.
SHARES_OF_A_POD = 4


def count_preparing_pods() -> int:
    """Return the number of pods that prepare a table, from the profile."""
    return current_profile().placement("prepare").nodes


class OpenSharesOutputs(NamedTuple):
    """Opened table, its shares of the work, and the spool (parsed columns) of every share."""

    table: Part
    shares: list[Part]
    spools: list[Part]


class FitSharesOutputs(NamedTuple):
    """Fitted transformation, the plan of the second pass, and the numbers of its partitions."""

    fitted: Part
    plan: Part
    partitions: list[int]


@task(**stage_metadata("prepare"))
@map_errors
def parse_share(share: Part) -> Part:
    """Parse the text files of one share to columns."""
    from slipstream.pipeline.prepare.sharded import shares

    parsed = fresh_directory("parsed")
    shares.parse_share(local_path(share), parsed)
    return output_directory(parsed)


@task(**stage_metadata("prepare"))
@map_errors
def open_shares(listing: Part, number: int, parsed: list[Part]) -> OpenSharesOutputs:
    """Open the table, whose text files are in ``parsed``, and cut the work into at most ``number`` shares."""
    from slipstream.pipeline.prepare.sharded import shares
    from slipstream.shared.artifacts import exchange

    summaries = [local_subdirectory(each, exchange.SUMMARY) for each in parsed]
    opened = shares.open_shares(resolved_source(listing), number, summaries, fresh_directory("opened"))
    spools = [output_directory(each) for each in opened.spools]
    return OpenSharesOutputs(
        output_directory(opened.table), [output_directory(each) for each in opened.shares], spools or parsed
    )


@task(**stage_metadata("prepare"))
@map_errors
def scan_share(share: Part, spool: Part) -> Part:
    """Run the first pass over one share, which collects statistics."""
    from slipstream.pipeline.prepare.sharded import shares

    scanned = fresh_directory("scanned")
    shares.scan_share(local_path(share), local_path(spool), scanned)
    return output_directory(scanned)


@task(**stage_metadata("prepare"))
@map_errors
def fit_shares(table: Part, scanned: list[Part], number: int) -> FitSharesOutputs:
    """Fit the transformation on the scans of all shares; plan a merge in at most ``number`` partitions."""
    from slipstream.pipeline.prepare.sharded import shares

    fitted, plan = fresh_directory("fitted"), fresh_directory("plan")
    partitions = shares.fit_shares(local_path(table), [local_path(each) for each in scanned], number, fitted, plan)
    return FitSharesOutputs(output_directory(fitted), output_directory(plan), list(range(partitions)))


@task(**stage_metadata("prepare"))
@map_errors
def encode_share(share: Part, spool: Part, scanned: Part, plan: Part) -> Part:
    """Run the second pass over one share, which encodes its rows for every partition."""
    from slipstream.pipeline.prepare.sharded import shares

    encoded = fresh_directory("encoded")
    shares.encode_share(local_path(share), local_path(spool), local_path(scanned), local_path(plan), encoded)
    return output_directory(encoded)


@task(**stage_metadata("prepare"))
@map_errors
def merge_partition(partition: int, plan: Part, encoded: list[Part]) -> Part:
    """Merge all shares' encoded rows of one partition of the prepared data."""
    from slipstream.pipeline.prepare.sharded import merge_partitions

    merged, name = fresh_directory("merged"), merge_partitions.partition_directory(partition)
    merge_partitions.merge_partition(
        partition, local_path(plan), [local_subdirectory(each, name) for each in encoded], merged
    )
    return output_directory(merged)


@task(**stage_metadata("prepare"))
@map_errors
def assemble(target: str, config: DataConfig, source: str, fitted: Part, merged: list[Part]) -> MadePrepared:
    """Assemble the merged partitions to the same bytes that :func:`prepare` writes for these inputs.

    Rows on S3 are copied within S3, and the artifact's other files are uploaded next to them. From other stores the
    rows are downloaded first.
    """
    from slipstream.pipeline.prepare.sharded import merge_partitions
    from slipstream.shared.artifacts import exchange

    addresses = [str(each.remote_source or "") for each in merged]
    home = output_address() if all(address.startswith(S3) for address in addresses) else ""

    def make(directory: Path, _: str) -> None:
        if home:
            parts = [
                merge_partitions.s3_parts(local_subdirectory(each, exchange.SUMMARY), str(each.remote_source), home)
                for each in merged
            ]
        else:
            parts = [merge_partitions.local_parts(local_path(each)) for each in merged]
        merge_partitions.assemble_artifact(
            directory,
            made_by(target, config, source),
            local_path(fitted),
            [one for partition in parts for one in partition],
            home,
        )

    made = run_stage("prepare", {"target": target, "config": config, "source": source}, make)
    artifact = FlyteDirectory(made.artifact.path, remote_directory=home) if home else made.artifact
    return MadePrepared(artifact, made.run)


def map_over_shares(work: Callable[..., object]) -> Callable[..., Promise]:
    """Return a map task over shares. All shares must succeed, or rows would be missing."""
    return map_task(work, concurrency=count_preparing_pods(), min_success_ratio=1.0)


def prepare_opened(opened: OpenSharesOutputs, target: str, config: DataConfig, source: str) -> MadePrepared:
    """Build the workflow nodes that follow the table's opening; arguments are promises."""
    scanned = map_over_shares(scan_share)(share=opened.shares, spool=opened.spools)
    fitted = fit_shares(table=opened.table, scanned=scanned, number=SHARES_OF_A_POD * count_preparing_pods())
    encode = map_over_shares(partial(encode_share, plan=fitted.plan))
    encoded = encode(share=opened.shares, spool=opened.spools, scanned=scanned)
    merge = map_over_shares(partial(merge_partition, plan=fitted.plan, encoded=encoded))
    merged = merge(partition=fitted.partitions)
    return assemble(target=target, config=config, source=source, fitted=fitted.fitted, merged=merged)


@profile_workflow
def prepare_by_units(listing: Part, target: str, config: DataConfig, source: str) -> MadePrepared:
    """Prepare a table by having every pod read some of its units, such as Parquet row groups."""
    opened = open_shares(listing=listing, number=SHARES_OF_A_POD * count_preparing_pods(), parsed=[])
    return prepare_opened(opened, target, config, source)


@profile_workflow
def prepare_by_files(listing: Part, target: str, config: DataConfig, source: str, texts: list[Part]) -> MadePrepared:
    """Prepare a table whose text files, cut into the shares ``texts``, are first parsed by all pods."""
    parsed = map_over_shares(parse_share)(share=texts)
    opened = open_shares(listing=listing, number=SHARES_OF_A_POD * count_preparing_pods(), parsed=parsed)
    return prepare_opened(opened, target, config, source)


def prepare_listed(listed: Listed, target: Promise) -> Promise:
    """Build the workflow nodes that prepare the data: one task, or several pods.

    Several pods need a profile with more than one node and data that can be divided. The fields of ``listed`` are
    promises; it may have more fields than :class:`Listed`.
    """
    listing, config, source = listed.listing, listed.data, listed.source
    if count_preparing_pods() == 1:
        return prepare(listing=listing, target=target, config=config, source=source)
    return (
        conditional("division")
        .if_(listed.division == "units")
        .then(prepare_by_units(listing=listing, target=target, config=config, source=source))
        .elif_(listed.division == "files")
        .then(prepare_by_files(listing=listing, target=target, config=config, source=source, texts=listed.texts))
        .else_()
        .then(prepare(listing=listing, target=target, config=config, source=source))
    )


def local_subdirectory(directory: FlyteDirectory, name: str) -> Path:
    """Return the local path of the subdirectory ``name`` of another task's output; only it is downloaded."""
    if not directory.remote_source:
        return Path(directory.path) / name
    return local_path(FlyteDirectory.from_source(f"{directory.remote_source}/{name}"))
