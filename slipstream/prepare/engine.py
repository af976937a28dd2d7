"""Raw data to prepared data: open, scan, fit, encode, merge."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from slipstream.artifacts.format import Artifact, ArtifactWriter
from slipstream.artifacts.prepared.data import KIND, TARGET, WEIGHT
from slipstream.artifacts.records import write_record
from slipstream.errors import UserError
from slipstream.prepare import quarantine
from slipstream.prepare.card.data_card import make_card
from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.number_formats import NumberFormat, retype
from slipstream.prepare.columns.transform import Transform
from slipstream.prepare.config import DataConfig
from slipstream.prepare.fit.fit import FittedColumns, check_values, fit
from slipstream.prepare.fit.scan import Rows, Scan, ScanResult, read_again, scan_unit
from slipstream.prepare.fit.splits import Cuts, find_cuts
from slipstream.prepare.images import holds_images, open_images, prepare_images
from slipstream.prepare.incremental import LASTING, REFERENCE, EarlierSet, value_of
from slipstream.prepare.memory import Budget
from slipstream.prepare.progress import say_goes_on, shown
from slipstream.prepare.shuffle.merge import MergedPart, enter_segments, merge_all
from slipstream.prepare.shuffle.sorted_runs import Run, RunWriter, order_keys
from slipstream.prepare.source.columnar import Unit, read
from slipstream.prepare.source.data_frames import frame_file
from slipstream.prepare.source.files import Listing, SourceFile, list_source, unchanged
from slipstream.prepare.source.fingerprint import digest_files
from slipstream.prepare.source.images.digits import open_digits
from slipstream.prepare.source.tables import TEXT_TABLES, Source, header_hint, one_format, open_source
from slipstream.prepare.source.text.folders import as_table
from slipstream.prepare.workers.pool import Workers, workers_for
from slipstream.prepare.workers.resume import ResumableScratch, resumable_scratch

if TYPE_CHECKING:
    import pandas as pd

SCRATCH = ".scratch"

#: Raw data: an address, a listing of one, or a table in memory.
Raw: TypeAlias = "str | Listing | pa.Table | pd.DataFrame"


def prepare(
    directory: Path,
    data: Raw,
    target: str,
    config: DataConfig,
    made_by: Mapping[str, Any],
    workers: int | None = None,
    scratch: Path | None = None,
) -> Artifact:
    """Make the prepared data in the fresh ``directory``. ``data`` is an address (empty: the digits of scikit-learn), a
    listing of one, a pandas DataFrame or an Arrow table.

    The same data and config give the same bytes on any number of ``workers`` (default: as many as the data is worth).
    A run that was interrupted resumes if it is given the same directory ``scratch`` again, on the disk of
    ``directory``; another config or other code need another one. It begins anew without ``scratch``, and if a file is
    not in the version that the interrupted run listed: nobody knows which bytes that one read.
    Raises ``UserError`` for what is wrong with the data.
    """
    listing = list_source(data) if isinstance(data, str) else data if isinstance(data, Listing) else None
    if workers is None:
        workers = workers_for(listing.size if listing else 0, config.memory)
    writer = ArtifactWriter(directory)
    try:
        with (
            closing(Workers(workers, __name__)) as processes,
            resumable_scratch(scratch or directory / SCRATCH, processes, lasting=scratch is not None) as place,
        ):
            if listing is None:
                listing = list_source(frame_file(data, place.root))
            place.bind(versions_in(listing, place.root), keep=[Path(file.uri) for file in listing.files])
            with unchanged(listing.files):
                if not listing.address:
                    prepare_images(writer, place, open_digits(target), config)
                elif holds_images(listing, config):
                    prepare_images(writer, place, open_images(listing, target, config), config)
                else:
                    made_by = prepare_table(writer, place, listing, target, config, made_by)
        return writer.finish(KIND, made_by)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{directory}: no space left on the disk; free some or work in another directory") from None


def versions_in(listing: Listing, scratch: Path) -> dict[str, Any]:
    """The listed files in their versions; one in ``scratch``, a table from memory, is named by its content instead."""
    files = [replace(file, version="") if Path(file.uri).parent == scratch else file for file in listing.files]
    return replace(listing, files=tuple(files)).to_json()


# Tables


@dataclass(frozen=True)
class EncodingPlan:
    """What a worker needs to encode a unit."""

    scan: Scan
    transform: Transform
    scratch: Path


@dataclass(frozen=True)
class EncodedUnit:
    """An encoded unit: sorted runs, all in one pair of files."""

    runs: list[Run]
    digests: dict[str, str]


@dataclass(frozen=True)
class OpenedTable:
    """A table that can be read, what to scan of it, and the columns that are left out."""

    source: Source
    scan: Scan
    dropped: list[str]
    #: The names and sizes of the files, and their common fingerprint, by the set that read them.
    sources: list[dict[str, Any]]
    earlier: EarlierSet | None = None


@dataclass(frozen=True)
class FittedTable:
    """The result of the first pass: what was found, and what was fitted to it."""

    opened: OpenedTable
    found: ScanResult
    fitted: FittedColumns

    @property
    def bad(self) -> list[quarantine.BadRow]:
        return self.opened.source.bad + self.found.bad


def prepare_table(
    writer: ArtifactWriter,
    place: ResumableScratch,
    data: Listing,
    target: str,
    config: DataConfig,
    made_by: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Write the prepared table; what made it, which is not ``made_by`` if a base set has all of the files."""
    if config.earlier:
        new = find_new_files(data, target, config, place.root / "earlier")
        if not new.files:
            return new.earlier.repeat(writer)
        opened = open_new_files(place, data, new)
    else:
        opened = open_table(place, data, target, config, made_by.get("source", ""))
    units = opened.source.units
    say_goes_on(place.found)
    rows = [unit.rows for unit in units]
    fitting = fit_table(opened, shown("scan", scan_units(place, opened.scan, units), rows))
    encoding = EncodingPlan(opened.scan, fitting.fitted.transform, place.root)
    with ThreadPoolExecutor(1) as beside:
        # This process waits for the others while they encode: time enough for the card.
        card = beside.submit(card_of, fitting, data)
        encoded = list(shown("encode", encode_units(place, encoding, units, fitting.found.rejected), rows))
        runs = [run for part in encoded for run in part.runs]
    merged = merge_all(place, runs, encoding.transform.signature.record.itemsize)
    write_table(writer, fitting, merged, card.result())
    return made_by


def open_table(
    place: ResumableScratch,
    data: Listing,
    target: str,
    config: DataConfig,
    fingerprint: str = "",
    source: Source | None = None,
) -> OpenedTable:
    """``fingerprint`` is that of all files of ``data``, taken now if nobody has; ``source`` is what they hold, if
    somebody has read them."""
    asked, (target, config) = target, as_table(data, target, config)
    source = source or open_source(data, config, place)
    dropped = check_columns(source, data, target, config)
    types = {name: kind for name, kind in source.types.items() if name not in dropped}
    scan = Scan(types, target, source.rows, config, time_cuts(source, config))
    fingerprint = fingerprint or digest_files([(data.relative(file), file) for file in data.files], asked)
    return OpenedTable(source, scan, dropped, [source_record(list(data.files), data, fingerprint)])


@dataclass(frozen=True)
class NewFiles:
    """The files that a base set has not seen, perhaps none, and the settings with which they are read.

    ``asked`` is the target that the user named, which is part of fingerprints: none for texts in class folders.
    """

    earlier: EarlierSet
    files: list[SourceFile]
    asked: str
    target: str
    config: DataConfig


def find_new_files(data: Listing, target: str, config: DataConfig, scratch: Path) -> NewFiles:
    """Raises ``UserError`` if the base set is another table's, or does not have the same files."""
    asked, (target, config) = target, as_table(data, target, config)
    earlier = EarlierSet.open(config.earlier, scratch)
    earlier.check_settings(target, config)
    new = earlier.unseen({data.relative(file): file for file in data.files}, asked)
    text = bool(new) and one_format(data, config, new) in TEXT_TABLES
    return NewFiles(earlier, new, asked, target, earlier.declared(config, text=text))


def open_new_files(place: ResumableScratch, data: Listing, new: NewFiles, source: Source | None = None) -> OpenedTable:
    """As :func:`open_table`, of the files that are new, of which there are some."""
    target, config = new.target, new.config
    source = source or open_source(data, config, place, new.files)
    new.earlier.check_columns(source.types)
    types = {name: kind for name, kind in source.types.items() if name not in config.drop}
    scan = Scan(types, target, source.rows, config, new.earlier.cuts)
    named = digest_files([(data.relative(file), file) for file in new.files], new.asked)
    sources = [*new.earlier.schema["sources"], source_record(new.files, data, named)]
    return OpenedTable(source, scan, config.drop, sources, new.earlier)


def source_record(files: list[SourceFile], data: Listing, fingerprint: str) -> dict[str, Any]:
    """What the schema says of the files that were read: their paths, sizes and common fingerprint."""
    return {"fingerprint": fingerprint, "files": [[data.relative(file), file.size] for file in files]}


def scan_units(place: ResumableScratch, scan: Scan, units: list[Unit]) -> Iterator[ScanResult]:
    """The first pass: what is in each unit."""
    return place.map(scan_unit, ((scan, unit) for unit in units))


def fit_table(opened: OpenedTable, parts: Iterable[ScanResult]) -> FittedTable:
    """Fit on what was found in all ``parts``, which are in the order of the units. Raises ``UserError`` for a table
    that cannot be learned from, or of which too much had to be set aside."""
    scan, source = opened.scan, opened.source
    found = ScanResult.nothing(scan)
    for part in parts:
        found.merge(part)
    if not opened.earlier:
        check_values(found, scan.target, scan.config)
    quarantine.check_limit(source.bad + found.bad, source.read, scan.config.quarantine_limit)
    fitted = opened.earlier.fitted(found) if opened.earlier else fit(found, scan.types, scan.target, scan.config)
    return FittedTable(opened, found, fitted)


def card_of(fitting: FittedTable, data: Listing) -> dict[str, Any]:
    opened = fitting.opened
    card = make_card(Path(data.address).name, opened.source, fitting.found, fitting.fitted, opened.dropped)
    return opened.earlier.continued(card, fitting.found.sample_table()) if opened.earlier else card


def write_table(
    writer: ArtifactWriter, fitting: FittedTable, merged: list[MergedPart], card: dict[str, Any], home: str = ""
) -> None:
    """Take up what was merged and write what goes with it. A base set's rows on S3 are copied there to ``home``."""
    scan, fitted, earlier = fitting.opened.scan, fitting.fitted, fitting.opened.earlier
    signature = fitted.transform.signature
    number = earlier.take_over_segments(writer, home) if earlier else 0
    enter_segments(writer, merged, number)
    bad = (earlier.bad if earlier else []) + fitting.bad
    quarantine.write(writer, bad)
    if earlier:
        writer.write_json(REFERENCE, earlier.reference)
    write_record(writer, "signature.json", signature)
    writer.write_json("statistics.json", fitted.transform.to_json())
    columns = [
        {"name": name, "type": kind, "role": fitted.roles[name].role if name in fitted.roles else "dropped"}
        for name, kind in fitting.opened.source.types.items()
    ]
    schema = {
        "columns": columns,
        "target": scan.target,
        "missing": scan.config.missing,
        "settings": {name: value_of(scan.config, name) for name in LASTING},
        "cuts": scan.cuts,
        "sources": fitting.opened.sources,
    }
    writer.write_json("schema.json", schema)
    writer.write_json("card.json", card)


def check_columns(source: Source, data: Listing, target: str, config: DataConfig) -> list[str]:
    """The columns to leave out. Raises ``UserError`` unless the target and the columns in the config exist."""
    names = list(source.types)
    if not target:
        raise UserError(f"target: name the column to predict with --target; {data.address!r} has {listed(names)}")
    aside = {name: getattr(config, name) for name in ("id", "group", "time", "weight")}
    wanted = {"target": target, **{f"data.{setting}": name for setting, name in aside.items()}}
    for setting, name in [
        *wanted.items(),
        *(("data.drop", name) for name in config.drop),
        *(("data.types", name) for name in config.types),
    ]:
        if name and name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the columns are {listed(names)}"
            raise UserError(f"{setting}: {data.address!r} has no column {name!r}; {hint}{shape_hint(names, config)}")
    if target in (*aside.values(), *config.drop):
        raise UserError(
            f"target: {target!r} is also data.id, group, time, weight or in data.drop; expected another column"
        )
    for setting, name in aside.items():
        if name in config.drop:
            raise UserError(f"data.drop: {name!r} is needed as data.{setting}, and is no feature anyway")
    if config.weight and source.types[config.weight] not in (value_types.INTEGER, value_types.NUMBER):
        kind = source.types[config.weight]
        raise UserError(f"data.weight: {config.weight!r} holds {kind} values; expected numbers from 0 on")
    if config.time and source.types[config.time] in (value_types.TEXT, value_types.OTHER):
        kind = source.types[config.time]
        raise UserError(f"data.time: {config.time!r} holds {kind} values; expected dates, times or numbers")
    if source.types[target] == value_types.OTHER:
        raise UserError(f"target: {target!r} holds neither numbers nor texts")
    if not set(names) - {target, *aside.values(), *config.drop}:
        raise UserError(
            f"data: {data.address!r} has no column to learn from: besides the target {target!r} there is "
            + (f"only what is set apart, {listed([name for name in names if name != target])}" if names[1:] else "none")
            + shape_hint(names, config)
        )
    return [name for name in names if name in config.drop]


def time_cuts(source: Source, config: DataConfig) -> Cuts | None:
    """Where time is cut into splits, if it is: as configured, else by the shares of all rows."""
    if not config.time:
        return None
    if config.split.test_from:
        return config.split.cuts
    kind, number_format = source.types[config.time], NumberFormat.of(config)
    parts = [
        value_types.as_numbers(retype(batch.column(0), kind, number_format)[0])
        for unit in source.units
        for batch, _ in read(unit, [config.time], Budget(config.memory))
    ]
    seconds = np.concatenate(parts)
    present = seconds[np.isfinite(seconds)]
    return find_cuts(present, config.split) if len(present) else (0.0, 0.0)


def listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown


def shape_hint(names: list[str], config: DataConfig) -> str:
    """What else may be the matter when no column has the name that is looked for."""
    separators = [mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]]
    if separators:
        return f"; if the fields are separated by {separators[0]!r}, set data.delimiter"
    return header_hint(names) if config.header else ""


def encode_units(
    place: ResumableScratch, encoding: EncodingPlan, units: list[Unit], rejected: list[np.ndarray]
) -> Iterator[EncodedUnit]:
    """The second pass: every row encoded, in sorted runs; but for the ``rejected`` rows of each unit."""
    return place.map(encode_unit, ((encoding, *pair) for pair in zip(units, rejected, strict=True)))


def encode_unit(job: tuple[EncodingPlan, Unit, np.ndarray]) -> EncodedUnit:
    """Encode one unit into sorted runs. Runs in a worker process."""
    encoding, unit, rejected = job
    scan, transform = encoding.scan, encoding.transform
    path = encoding.scratch / f"run-{unit.first_row:012d}"
    # For all batches: the system would clear fresh memory for each of them.
    room = np.zeros(min(unit.rows, scan.batch_rows), transform.signature.record)
    with RunWriter(path) as writer:
        for rows in read_again(scan, unit, rejected):
            order = order_keys(rows.first_row, rows.batch.num_rows, scan.rows, scan.config.shuffle)
            records = room[: rows.batch.num_rows]
            numbers = scan.numbers(rows.batch)
            encode(transform, rows, numbers, records)
            for split, chosen in rows.parts():
                writer.add(split, chosen, order, records)
    return EncodedUnit(writer.runs, writer.digests)


def encode(transform: Transform, rows: Rows, numbers: dict[str, np.ndarray], records: np.ndarray) -> None:
    """Inputs and weights of all rows and targets of those to keep into ``records``."""
    transform.encode(rows.batch, records, numbers)
    target = rows.batch.column(transform.target).take(pa.array(rows.keep))
    records[TARGET][rows.keep] = transform.encode_target(target)
    if transform.weight:
        records[WEIGHT] = transform.encode_weight(rows.batch.column(transform.weight))
