"""Entry point of preparation: images in one pass, tables in two, language in three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from slipstream.pipeline.prepare.images import prepare_images
from slipstream.pipeline.prepare.language.engine import prepare_language
from slipstream.pipeline.prepare.progress import say_resumed, with_progress
from slipstream.pipeline.prepare.resolve import SourceToPrepare, frame_file, resolve_source
from slipstream.pipeline.prepare.shuffle import merge_all
from slipstream.pipeline.prepare.table import data_card, encode_units, fit_table, open_table, scan_units, write_table
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND
from slipstream.shared.artifacts.resume import ResumableScratch, resumable_scratch
from slipstream.shared.distributed.pool import WorkerPool, workers_for
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.documents import list_data
from slipstream.shared.source.files import Listing, files_unchanged, list_source
from slipstream.shared.storage import out_of_space

if TYPE_CHECKING:
    import pandas as pd

SCRATCH = ".scratch"

#: Raw data: an address, a listing, or a table in memory.
Raw: TypeAlias = "str | Listing | pa.Table | pd.DataFrame"


def prepare(
    directory: Path,
    data: Raw,
    target: str,
    config: DataConfig,
    made_by: Mapping[str, object],
    workers: int | None = None,
    scratch: Path | None = None,
) -> Artifact:
    """Write the prepared data to the new ``directory``.

    ``data`` is an address ("" for scikit-learn's digits), a listing, a pandas DataFrame or an Arrow table. ``made_by``
    goes into the manifest; its ``source``, if any, is the fingerprint of the data.

    The same data and config give the same bytes with any number of ``workers``, by default chosen by the size of the
    data. An interrupted run resumes with its ``scratch`` directory, which must be on the disk of ``directory`` and
    serve this config and code only, unless a file has changed since. Raise ``UserError`` for bad data.
    """
    listing = list_data(data, target, config) if isinstance(data, str) else data if isinstance(data, Listing) else None
    size = listing.size if listing else 0
    with full_disk_named(directory):
        writer = ArtifactWriter(directory)
        with workspace(directory, size, config.memory, workers, scratch) as work:
            listing = listing or list_source(frame_file(data, work.root))
            with files_unchanged(listing.files):
                source = resolve_source(listing, target, config, str(made_by.get("source", "")))
                made_by = write_prepared_files(writer, source, made_by, work)
        return writer.finish(KIND, made_by)


def prepare_source(
    directory: Path,
    source: SourceToPrepare,
    made_by: Mapping[str, object],
    workers: int | None = None,
    scratch: Path | None = None,
) -> Artifact:
    """Prepare an already resolved source as :func:`prepare` does."""
    files = source.listing.files
    with full_disk_named(directory):
        writer = ArtifactWriter(directory)
        with (
            workspace(directory, source.size, source.config.memory, workers, scratch) as work,
            files_unchanged(files),
        ):
            made_by = write_prepared_files(writer, source, made_by, work)
        return writer.finish(KIND, made_by)


@contextmanager
def full_disk_named(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not out_of_space(error):
            raise
        raise UserError(f"{directory}: no space left on the disk; free some or work in another directory") from None


@contextmanager
def workspace(
    directory: Path, size: int, memory: float, workers: int | None, scratch: Path | None
) -> Iterator[ResumableScratch]:
    """Yield a scratch directory with worker processes, by default as many as suit ``size`` bytes."""
    count = workers_for(size, memory) if workers is None else workers
    with (
        closing(WorkerPool(count, __name__)) as processes,
        resumable_scratch(scratch or directory / SCRATCH, processes, lasting=scratch is not None) as work,
    ):
        yield work


def write_prepared_files(
    writer: ArtifactWriter, source: SourceToPrepare, made_by: Mapping[str, object], scratch: ResumableScratch
) -> Mapping[str, object]:
    """Write all files except the manifest; return the manifest's ``made_by``.

    It is the base set's if there are no new files.
    """
    files = source.listing.files
    scratch.bind(versions_in(source.listing, scratch.root), keep=[Path(file.uri) for file in files])
    say_resumed(scratch.done_before)
    if source.base:
        source.base.verify()
        if not source.files:
            return source.base.repeat(writer)
    if source.kind == "language":
        prepare_language(writer, scratch, source)
    elif source.kind == "images":
        prepare_images(writer, scratch, source)
    else:
        prepare_table(writer, scratch, source)
    return made_by


def versions_in(listing: Listing, scratch: Path) -> dict[str, object]:
    """Return the address of a listing, and the sizes and versions of its files.

    A table from memory, stored in ``scratch``, has no version: its file name is a digest of its content.
    """
    files = [[file.uri, file.size, "" if Path(file.uri).parent == scratch else file.version] for file in listing.files]
    return {"address": listing.address, "files": files}


def prepare_table(writer: ArtifactWriter, scratch: ResumableScratch, source: SourceToPrepare) -> None:
    opened = open_table(source, scratch)
    scan, units = opened.scan, opened.input.units
    rows = [unit.rows for unit in units]
    fitting = fit_table(opened, with_progress("scan", scan_units(scratch, scan, units), rows))
    transform, rejected = fitting.fitted.transform, fitting.scanned.rejected
    with ThreadPoolExecutor(1) as beside:
        # This process is idle while the workers encode: time enough for the card.
        card = beside.submit(data_card, fitting)
        encoded = list(with_progress("encode", encode_units(scratch, scan, transform, units, rejected), rows))
    runs = [run for unit in encoded for run in unit.runs]
    merged = merge_all(scratch, runs, transform.signature.record.itemsize)
    write_table(writer, fitting, merged, card.result())
