"""Steps of preparing a table: open, scan, fit, encode, and write the merged rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from slipstream.pipeline.prepare.base_set import REFERENCE, TableSchema
from slipstream.pipeline.prepare.card import make_card, with_skipped
from slipstream.pipeline.prepare.fit.fit import FittedColumns, check_values, fit_columns
from slipstream.pipeline.prepare.fit.scan import ScanUnitJob, SplitRows, read_again, scan_unit
from slipstream.pipeline.prepare.fit.scan_result import ScanResult, UnitScan
from slipstream.pipeline.prepare.fit.splits import TEST, Cuts, find_cuts
from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.pipeline.prepare.shuffle import MergedPart, RunWriter, SortedRun, enter_segments, order_keys
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.card import CARD, DataCard
from slipstream.shared.artifacts.prepared.data import SPLITS, TARGET, WEIGHT
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.source import quarantine
from slipstream.shared.source.columnar import TableInput, Unit, read_unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.number_formats import NumberFormat, retype_column
from slipstream.shared.source.columns.spelling import rule_of
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.config import FOLDER, DataConfig
from slipstream.shared.source.documents import open_documents
from slipstream.shared.source.given_splits import in_words, missing_splits, names_in, report_drawn, split_number
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.tables import header_hint, open_columnar
from slipstream.shared.source.text.text_tables import open_text

OPENERS = {"columnar": open_columnar, "text": open_text, "documents": open_documents}


@dataclass(frozen=True)
class OpenedTable:
    """Opened table with the settings of its scan and its dropped columns."""

    source: SourceToPrepare
    input: TableInput
    scan: UnitScan
    dropped: list[str]


@dataclass(frozen=True)
class FittedTable:
    """Opened table, counts of the first pass and the fit."""

    opened: OpenedTable
    scanned: ScanResult
    fitted: FittedColumns


def open_table(source: SourceToPrepare, scratch: ResumableScratch, parsed: TableInput | None = None) -> OpenedTable:
    """Open the files, or use the already ``parsed`` text; raise ``UserError`` for bad data."""
    table = parsed or OPENERS[source.kind](source, scratch)
    if table.read == 0:
        raise UserError(f"data: {source.address!r} has a header and no rows; expected at least one row of data")
    config = source.config
    if source.base:
        source.base.check_columns(table.types, table.indices)
        aside, cuts = source.base.schema.dropped, source.base.schema.cuts
    else:
        check_columns(table, source)
        aside, cuts = {*config.drop}, time_cuts(table, config)
    drawn = drawn_splits(table, config, source.base.schema.drawn if source.base else None)
    dropped = [name for name in table.types if name in aside or name in table.indices]
    table = replace(table, warnings=[*table.warnings, *index_warnings(table.indices)])
    types = {name: kind for name, kind in table.types.items() if name not in dropped}
    return OpenedTable(source, table, UnitScan(types, source.target, table.rows, config, cuts, drawn), dropped)


def scan_units(scratch: ResumableScratch, scan: UnitScan, units: list[Unit]) -> Iterator[ScanResult]:
    """Run the first pass over every unit."""
    jobs = (ScanUnitJob(scan, unit, scratch.root / f"scan-{number:06d}.bad") for number, unit in enumerate(units))
    return scratch.map(scan_unit, jobs)


def fit_table(opened: OpenedTable, parts: Iterable[ScanResult]) -> FittedTable:
    """Fit on the results ``parts``, given in unit order, or use the fit of the base set.

    Raise ``UserError`` for a table that cannot be learned from, or with too many quarantined rows.
    """
    scan, table, base = opened.scan, opened.input, opened.source.base
    scanned = ScanResult.nothing(scan)
    limit, rows = scan.config.quarantine_limit, 0
    for part, unit in zip(parts, table.units, strict=True):
        scanned.merge(part)
        rows += unit.rows
        if rows < table.rows:
            quarantine.check_limit(table.bad + scanned.bad, table.read, limit, certain=True)
    bad = table.bad + scanned.bad
    scanned.measure_again()
    if scan.types[scan.target] == value_types.TEXT:
        scanned.spell_classes(rule_of(base.transform.classes) if base else "")
    if base is None:
        check_values(scanned, bad, scan.target, scan.config)
    quarantine.check_limit(bad, table.read, limit)
    sample = scanned.sample_table()
    fitted = base.fitted(scanned) if base else fit_columns(scanned, sample, scan.types, scan.target, scan.config)
    warnings = [*scan.rule.warnings(scanned.rows, scanned.gaps, sample), *scanned.overlap.warnings()]
    warnings += in_words(scan.drawn or (), scan.config)
    return FittedTable(opened, scanned, replace(fitted, warnings=[*fitted.warnings, *warnings]))


# The second pass


@dataclass(frozen=True)
class EncodeUnitJob:
    """Job of one worker: encode a unit without its ``rejected`` rows into files in ``scratch``."""

    scan: UnitScan
    transform: Transform
    unit: Unit
    rejected: np.ndarray
    scratch: Path


@dataclass(frozen=True)
class EncodedUnit:
    """Sorted runs of an encoded unit, all in one pair of files."""

    runs: list[SortedRun]
    digests: dict[str, str]


def encode_units(
    scratch: ResumableScratch, scan: UnitScan, transform: Transform, units: list[Unit], rejected: list[np.ndarray]
) -> Iterator[EncodedUnit]:
    """Encode the rows of every unit; ``rejected`` has the bad rows' numbers per unit."""
    jobs = (EncodeUnitJob(scan, transform, *pair, scratch.root) for pair in zip(units, rejected, strict=True))
    return scratch.map(encode_unit, jobs)


def encode_unit(job: EncodeUnitJob) -> EncodedUnit:
    """Encode one unit as sorted runs; runs in a worker process."""
    scan, transform, unit = job.scan, job.transform, job.unit
    # Shared by all batches: the system would clear new memory for each.
    room = np.zeros(min(unit.rows, scan.batch_rows), transform.signature.record)
    with RunWriter(job.scratch / f"run-{unit.first_row:012d}") as writer:
        for rows in read_again(scan, unit, job.rejected):
            order = order_keys(rows.first_row, rows.batch.num_rows, scan.rows, scan.config.shuffle)
            records = room[: rows.batch.num_rows]
            encode_records(transform, rows, scan.numbers(rows.batch), records)
            for split, chosen in rows.parts():
                writer.add(split, chosen, order, records)
    return EncodedUnit(writer.runs, writer.digests)


def encode_records(transform: Transform, rows: SplitRows, numbers: dict[str, np.ndarray], records: np.ndarray) -> None:
    """Write inputs and weights of all rows, and targets of the good rows, to ``records``."""
    transform.encode(rows.batch, records, numbers)
    target = rows.batch.column(transform.target).take(pa.array(rows.keep))
    records[TARGET][rows.keep] = transform.encode_target(target)
    if transform.weight:
        records[WEIGHT] = transform.encode_weight(rows.batch.column(transform.weight))


# Output


def data_card(fitting: FittedTable) -> DataCard:
    opened, scanned = fitting.opened, fitting.scanned
    card = make_card(opened.source.name, opened.input, scanned, fitting.fitted, opened.dropped)
    card = with_skipped(card, opened.source.listing)
    return opened.source.base.continued(card, scanned.sample_table()) if opened.source.base else card


def write_table(
    writer: ArtifactWriter, fitting: FittedTable, merged: list[MergedPart], card: DataCard, home: str = ""
) -> None:
    """Write the merged rows and their description; a base set's rows on S3 are copied to ``home`` within S3."""
    opened, fitted = fitting.opened, fitting.fitted
    scan, source = opened.scan, opened.source
    number, bad = 0, iter(opened.input.bad + fitting.scanned.bad)
    if source.base:
        number, bad = source.base.copy_rows(writer, home), chain(source.base.quarantined(), bad)
        writer.write_json(REFERENCE, source.base.reference)
    enter_segments(writer, merged, number)
    quarantine.write_quarantine(writer, bad)
    write_record(writer, "signature.json", fitted.transform.signature)
    writer.write_json("statistics.json", fitted.transform.to_json())
    columns = [
        {"name": name, "type": kind, "role": fitted.roles[name].role if name in fitted.roles else "dropped"}
        for name, kind in opened.input.types.items()
    ]
    gaps, held_out = fitting.scanned.gaps, source.base.schema.held_out if source.base else "0"
    if held_out is not None:
        given = scan.drawn is not None and TEST not in scan.drawn
        held_out = fitting.scanned.overlap.held_out(held_out) if given else None
    if source.base:
        gaps = [a + b for a, b in zip(gaps, source.base.schema.gaps, strict=True)]
    files = list(source.file_sets)
    schema = TableSchema(columns, scan.target, scan.config, scan.cuts, files, gaps, scan.drawn, held_out)
    writer.write_json("schema.json", schema.to_json())
    writer.write_json(CARD, card.to_json())


def index_warnings(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"{listed(names)}: dropped as an index without a name; to keep it as a column, rename it"]


def time_cuts(table: TableInput, config: DataConfig) -> Cuts | None:
    """Return the times that separate splits: as configured, else by the shares of rows; None if not split by time."""
    if not config.time:
        return None
    if config.split.test_from:
        return config.split.cuts
    kind, number_format = table.types[config.time], NumberFormat.of(config)
    parts = [
        value_types.as_numbers(retype_column(batch.column(0), kind, number_format)[0])
        for unit in table.units
        for batch, _ in read_unit(unit, [config.time], MemoryBudget(config.memory))
    ]
    seconds = np.concatenate(parts)
    present = seconds[np.isfinite(seconds)]
    return find_cuts(present, config.split) if len(present) else (0.0, 0.0)


def drawn_splits(table: TableInput, config: DataConfig, before: list[int] | None) -> list[int] | None:
    """Return the splits that are drawn because the data do not give them; None if splits are not given.

    ``before`` are those of a base set, whose new files must not give them.
    """
    if not config.split.is_given:
        return None
    column, names = config.split.named_by, set[str | None]()
    for unit in table.units:
        if column in unit.partition:
            names.add(unit.partition[column])
        else:
            for batch, _ in read_unit(unit, [column], MemoryBudget(config.memory)):
                names |= names_in(batch.column(0))
    if before is None:
        return report_drawn(names, config)
    missing_splits({*names, "train"}, config)
    if both := sorted(SPLITS[number] for number in before if number in map(split_number, names)):
        raise UserError(
            f"data.split: the new files give a {both[0]} split, which was drawn from the training rows of the earlier "
            "data; prepare all files together"
        )
    return before


# The columns that the user names


def check_columns(table: TableInput, source: SourceToPrepare) -> None:
    """Raise ``UserError`` unless the target and the columns in the settings exist and have valid types."""
    names, types, target, config = list(table.types), table.types, source.target, source.config
    if not target:
        raise UserError(f"target: name the column to predict with --target; {source.address!r} has {listed(names)}")
    special = {name: getattr(config, name) for name in ("id", "group", "time", "weight")}
    special["split.column"] = config.split.column
    named = {"target": target, **{f"data.{setting}": name for setting, name in special.items()}}
    for setting, name in [
        *named.items(),
        *(("data.drop", name) for name in config.drop),
        *(("data.types", name) for name in config.types),
    ]:
        if name and name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the columns are {listed(names)}"
            raise UserError(f"{setting}: {source.address!r} has no column {name!r}; {hint}{shape_hint(names, config)}")
    if target in (*special.values(), *config.drop):
        raise UserError(
            f"target: {target!r} is also data.id, group, time, weight, split.column or in data.drop; expected another "
            "column"
        )
    for setting, name in special.items():
        if name in config.drop:
            raise UserError(
                f"data.drop: {name!r} is needed as data.{setting}, which is never a feature; remove it from data.drop"
            )
    if config.weight and types[config.weight] not in value_types.NUMBERS:
        kind = types[config.weight]
        raise UserError(f"data.weight: {config.weight!r} holds {kind} values; expected numbers from 0 on")
    if config.time and types[config.time] in (value_types.TEXT, value_types.OTHER):
        kind = types[config.time]
        raise UserError(f"data.time: {config.time!r} holds {kind} values; expected dates, times or numbers")
    if types[target] == value_types.OTHER:
        raise UserError(f"target: {target!r} holds neither numbers nor texts")
    if not set(names) - {target, *special.values(), *config.drop, *table.indices, FOLDER}:
        raise UserError(
            f"data: {source.address!r} has no column to use as a feature: in addition to the target {target!r} there "
            "is "
            + (
                "only an index or columns that data.id, group, time, weight or drop name, "
                f"{listed([name for name in names if name != target])}"
                if names[1:]
                else "none"
            )
            + shape_hint(names, config)
        )


def listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown


def shape_hint(names: list[str], config: DataConfig) -> str:
    """Return a hint about delimiter or header for the error that a column was not found, or ""."""
    separators = [mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]]
    if separators:
        return f"; if the fields are separated by {separators[0]!r}, set data.delimiter"
    return header_hint(names) if config.header else ""
