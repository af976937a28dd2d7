"""Preparing data as Flyte tasks: in one pod, or shared by several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flytekit import StructuredDataset, map_task, task
from flytekit.types.directory import FlyteDirectory

from tasks.artifacts.format import Artifact, ArtifactWriter
from tasks.artifacts.store import Store
from tasks.artifacts.versions import code_version
from tasks.flyte.metadata import on
from tasks.flyte.stage import (
    STORE,
    ArtifactDirectory,
    Made,
    fresh_directory,
    local_path,
    map_errors,
    run_stage,
    runs_locally,
)
from tasks.hardware.profile import current_profile
from tasks.preprocess.config import DataConfig
from tasks.settings import to_dict
from tasks.storage import S3

if TYPE_CHECKING:
    from tasks.preprocess.read.files import Listing

LISTING = "listing.json"


class Listed(NamedTuple):
    """The raw data as it is now: the files and their versions, and what identifies their bytes."""

    listing: ArtifactDirectory
    source: str


@task(**on("fingerprint"))
@map_errors
def list_data(data: str = "", target: str = "", config: DataConfig = DataConfig()) -> Listed:  # noqa: B008
    """List the raw data and fingerprint it. Never cached: new bytes behind the same name are new work."""
    from tasks.preprocess.incremental import fingerprint_earlier
    from tasks.preprocess.read.files import list_source
    from tasks.preprocess.read.fingerprint import fingerprint_source

    listing = list_source(data)
    source = fingerprint_source(listing, target) + fingerprint_earlier(config.earlier)
    writer = ArtifactWriter(fresh_directory("listing"))
    writer.write_json(LISTING, listing.to_json())
    return Listed(handed(writer.finish("listing", {}).directory), source)


def read_listing(directory: FlyteDirectory) -> Listing:
    """What :func:`list_data` found."""
    from tasks.preprocess.read.files import Listing

    return Listing.from_json(Artifact.open(local_path(directory), "listing").read_json(LISTING))


@task(**on("fingerprint"))
@map_errors
def address_of(dataset: StructuredDataset) -> str:
    """Where the Parquet of a dataset lies, which an upstream task returned as it is or as a DataFrame."""
    from tasks.preprocess.read.structured_dataset import parquet_address

    written = dataset.literal
    assert written is not None, "flytekit hands a dataset over with its literal"
    return parquet_address(written.uri, written.metadata.structured_dataset_type.format)


@task(**on("prepare", besides=("listing",)))
@map_errors
def prepare(listing: ArtifactDirectory, target: str, config: DataConfig, source: str) -> Made:
    """Make the prepared data. The fingerprint ``source`` stands for the listed files in the cache: the same bytes at
    another address are no new work."""

    def make(directory: Path, key: str) -> Artifact:
        from tasks.preprocess import engine

        kept = Store(STORE).checkpoints("prepare", key) if runs_locally() else None
        by = made_by(target, config, source)
        return engine.prepare(directory, read_listing(listing), target, config, by, kept=kept)

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
    """What was found in all shares, the plan of what is left to do, and the numbers of its lots."""

    found: ArtifactDirectory
    plan: ArtifactDirectory
    lots: list[int]


@task(**on("prepare"))
@map_errors
def open_texts(
    listing: ArtifactDirectory, target: str, config: DataConfig, source: str, number: int
) -> list[ArtifactDirectory]:
    """Cut files of text, which ``source`` identifies, into at most ``number`` lots; other data is one empty lot."""
    from tasks.preprocess.cluster import csv_parsing

    root = fresh_directory("texts")
    return [
        handed(lot)
        for lot in csv_parsing.open_texts(
            read_listing(listing), target, config, number, lambda index: root / f"{index:05d}"
        )
    ]


@task(**on("prepare"))
@map_errors
def parse_lot(lot: ArtifactDirectory) -> ArtifactDirectory:
    """Make the files of one lot columnar."""
    from tasks.preprocess.cluster import csv_parsing

    parsed = fresh_directory("parsed")
    csv_parsing.parse_lot(local_path(lot), parsed)
    return handed(parsed)


@task(**on("prepare"))
@map_errors
def open_shares(
    listing: ArtifactDirectory,
    target: str,
    config: DataConfig,
    source: str,
    number: int,
    parsed: list[ArtifactDirectory],
) -> Opened:
    """Open the table, of which text is ``parsed``, and cut the work into at most ``number`` shares."""
    from tasks.preprocess.cluster import exchange, shares

    table, share, spool = fresh_directory("table"), fresh_directory("shares"), fresh_directory("spools")
    said = [inner(each, exchange.SAID) for each in parsed]
    opened, spools = shares.open_shares(
        read_listing(listing),
        target,
        config,
        source,
        number,
        said,
        table,
        lambda i: share / f"{i:05d}",
        lambda i: spool / f"{i:05d}",
    )
    return Opened(handed(table), [handed(each) for each in opened], [handed(each) for each in spools] or parsed)


@task(**on("prepare"))
@map_errors
def survey_share(share: ArtifactDirectory, spool: ArtifactDirectory) -> ArtifactDirectory:
    """The first pass over one share."""
    from tasks.preprocess.cluster import shares

    surveyed = fresh_directory("surveyed")
    shares.survey_share(local_path(share), local_path(spool), surveyed)
    return handed(surveyed)


@task(**on("prepare"))
@map_errors
def fit_shares(table: ArtifactDirectory, surveyed: list[ArtifactDirectory], number: int) -> Fitted:
    """Fit on what was found in all shares, and plan to merge in at most ``number`` lots."""
    from tasks.preprocess.cluster import shares

    found, plan = fresh_directory("found"), fresh_directory("plan")
    lots = shares.fit_shares(local_path(table), [local_path(each) for each in surveyed], number, found, plan)
    return Fitted(handed(found), handed(plan), list(range(lots)))


@task(**on("prepare"))
@map_errors
def encode_share(
    share: ArtifactDirectory, spool: ArtifactDirectory, surveyed: ArtifactDirectory, plan: ArtifactDirectory
) -> ArtifactDirectory:
    """The second pass over one share."""
    from tasks.preprocess.cluster import shares

    encoded = fresh_directory("encoded")
    shares.encode_share(local_path(share), local_path(spool), local_path(surveyed), local_path(plan), encoded)
    return handed(encoded)


@task(**on("prepare"))
@map_errors
def merge_lot(lot: int, plan: ArtifactDirectory, encoded: list[ArtifactDirectory]) -> ArtifactDirectory:
    """Merge some parts of the prepared data, of which every share has a piece."""
    from tasks.preprocess.cluster import merge_partitions

    merged = fresh_directory("merged")
    merge_partitions.merge_lot(
        lot, local_path(plan), [inner(each, merge_partitions.name_of(lot)) for each in encoded], merged
    )
    return handed(merged)


@task(**on("prepare"))
@map_errors
def assemble(
    listing: ArtifactDirectory,
    target: str,
    config: DataConfig,
    source: str,
    found: ArtifactDirectory,
    merged: list[ArtifactDirectory],
) -> Made:
    """Put together what was merged: the same bytes, from the same inputs, as of :func:`prepare`.

    Rows that lie on S3 are copied there, the rest of the artifact is uploaded beside them; from another store rows come
    through this pod.
    """
    from tasks.preprocess.cluster import exchange, merge_partitions

    addresses = [str(each.remote_source or "") for each in merged]
    home = str(FlyteDirectory.new_remote().path) if all(address.startswith(S3) for address in addresses) else ""

    def make(directory: Path, _: str) -> None:
        if home:
            parts = [
                merge_partitions.parts_on_s3(inner(each, exchange.SAID), str(each.remote_source), home)
                for each in merged
            ]
        else:
            parts = [merge_partitions.parts_in(local_path(each)) for each in merged]
        merge_partitions.assemble(
            directory,
            read_listing(listing),
            target,
            config,
            made_by(target, config, source),
            local_path(found),
            [one for lot in parts for one in lot],
            home,
        )

    made = run_stage("prepare", {"target": target, "config": config, "source": source}, make)
    return Made(FlyteDirectory(made.artifact.path, remote_directory=home), made.run) if home else made


def prepare_data(data: Any, target: Any, config: Any) -> Any:
    """The part of a workflow that makes the prepared data: one task, or as many pods as the profile gives it nodes.

    The arguments are promises; ``config`` is the workflow's, with a section ``data``: flytekit cannot resolve one
    promise of a section twice.
    """
    found = list_data(data=data, target=target, config=config.data)
    listing, source = found.listing, found.source
    pods = current_profile().placement("prepare").nodes
    if pods == 1:
        return prepare(listing=listing, target=target, config=config.data, source=source)
    # All or nothing: without one share the data would be other data.
    spread = partial(map_task, concurrency=pods, min_success_ratio=1.0)
    number = SHARES_OF_A_POD * pods
    texts = open_texts(listing=listing, target=target, config=config.data, source=source, number=number)
    parsed = spread(parse_lot)(lot=texts)
    opened = open_shares(
        listing=listing, target=target, config=config.data, source=source, number=number, parsed=parsed
    )
    surveyed = spread(survey_share)(share=opened.shares, spool=opened.spools)
    fitted = fit_shares(table=opened.table, surveyed=surveyed, number=number)
    encode = spread(partial(encode_share, plan=fitted.plan))
    encoded = encode(share=opened.shares, spool=opened.spools, surveyed=surveyed)
    merged = spread(partial(merge_lot, plan=fitted.plan, encoded=encoded))(lot=fitted.lots)
    return assemble(
        listing=listing,
        target=target,
        config=config.data,
        source=source,
        found=fitted.found,
        merged=merged,
    )


def handed(directory: Path) -> FlyteDirectory:
    return FlyteDirectory(str(directory.absolute()))


def inner(directory: FlyteDirectory, name: str) -> Path:
    """A directory in what another task handed on; it is downloaded without the others."""
    if not directory.remote_source:
        return Path(directory.path) / name
    return local_path(FlyteDirectory.from_source(f"{directory.remote_source}/{name}"))
