"""First pass over a table: check every row, assign its split and count its values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.pipeline.prepare.fit.moments import (
    CodeOccurrences,
    ColumnMoments,
    TextOccurrences,
    column_moments,
)
from slipstream.pipeline.prepare.fit.scan_result import SPLIT, ScanResult, UnitScan
from slipstream.pipeline.prepare.fit.splits import TRAIN, SplitOverlap
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.source.columnar import Unit, read_unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import row_keys
from slipstream.shared.source.columns.number_formats import NumberFormat, missing_marks, retype_column
from slipstream.shared.source.columns.spelling import (
    spelling_rules,
)
from slipstream.shared.source.quarantine import BadRow, QuarantinedRows

SAMPLE_SEED = 1
TEXT_IN_SAMPLE = 256
#: Rows with larger numbers, infinity included, are quarantined: they do not fit float32.
LARGEST = 1e38
NO_TARGET = "the target is missing"
#: Chunks of the sample by column.
Drawn: TypeAlias = defaultdict[str, list[np.ndarray | pa.Array]]


@dataclass(frozen=True)
class SplitRows:
    """Batch with splits; ``keep`` are the indices of good rows, by split and then in input order."""

    batch: pa.RecordBatch
    first_row: int
    splits: np.ndarray
    keep: np.ndarray

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield every split with the indices of its good rows."""
        ends = np.searchsorted(self.splits[self.keep], np.arange(len(SPLITS) + 1))
        for split in range(len(SPLITS)):
            yield split, self.keep[ends[split] : ends[split + 1]]


def read_again(scan: UnitScan, unit: Unit, rejected: np.ndarray) -> Iterator[SplitRows]:
    """Yield an already scanned unit batch by batch; ``rejected`` are row numbers in the unit."""
    done = 0
    for original, lines in read_unit(unit, list(scan.types), scan.budget):
        batch, _ = as_declared(original, scan)
        here = rejected[(rejected >= done) & (rejected < done + batch.num_rows)] - done
        splits, _ = scan.rule.assign(original, batch, lines, unit)
        yield split_rows(batch, unit.first_row + done, splits, here)
        done += batch.num_rows


def split_rows(batch: pa.RecordBatch, first_row: int, splits: np.ndarray, rejected: np.ndarray) -> SplitRows:
    """Return the rows sorted by split, without ``rejected``, which are row numbers in the batch."""
    ordered = np.argsort(splits, kind="stable")
    if len(rejected):
        good = np.ones(batch.num_rows, bool)
        good[rejected] = False
        ordered = ordered[good[ordered]]
    return SplitRows(batch, first_row, splits, ordered)


@dataclass(frozen=True)
class ScanUnitJob:
    scan: UnitScan
    unit: Unit
    aside: Path


def scan_unit(job: ScanUnitJob) -> ScanResult:
    result = ScanResult.nothing(job.scan)
    bad = QuarantinedRows.spooled(bad_rows(job, result), job.aside)
    return replace(result, bad=bad)


def bad_rows(job: ScanUnitJob, result: ScanResult) -> Iterator[BadRow]:
    """Yield the bad rows of a unit while adding everything else to ``result``."""
    scan, unit = job.scan, job.unit
    counting: dict[str, CodeOccurrences] = {}
    drawn: Drawn = defaultdict(list)
    done = 0
    for original, lines in read_unit(unit, list(scan.types), scan.budget):
        batch, unreadable = as_declared(original, scan)
        numbers = scan.numbers(batch)
        splits, gaps = scan.rule.assign(original, batch, lines, unit)
        reasons = judge_rows(batch, numbers, unreadable, scan)
        rows, figures = measure_rows(batch, numbers, unit.first_row + done, splits, reasons)
        if figures.largest > LARGEST:
            # The extremes show cheaply whether such values exist; the rows are searched only then.
            reasons = judge_sizes(numbers) | reasons
            rows, figures = measure_rows(batch, numbers, unit.first_row + done, splits, reasons)
        yield from set_aside(original, reasons, lines, unit, scan)
        result.rejected.append(done + np.array(sorted(reasons), np.int64))
        count_rows(rows, scan, result)
        if scan.drawn is not None:
            count_overlap(rows, original, lines, numbers, unit, scan, result.overlap)
        result.gaps = [count + int((gaps[rows.keep] > lacks).sum()) for lacks, count in enumerate(result.gaps)]
        result.figures = result.figures.merge(figures)
        result.order = result.order.then(list(numbers.values()))
        count_texts(rows, counting, scan, result)
        draw_sample(rows, numbers, scan, drawn)
        done += batch.num_rows
    for name, counts in counting.items():
        add_dictionary_counts(name, counts, scan, result)
    if drawn:
        result.sample.append(sample_of(drawn, scan))
    result.rejected = [np.concatenate([np.empty(0, np.int64), *result.rejected])]


def count_overlap(
    rows: SplitRows,
    original: pa.RecordBatch,
    lines: np.ndarray,
    numbers: dict[str, np.ndarray],
    unit: Unit,
    scan: UnitScan,
    overlap: SplitOverlap,
) -> None:
    """Add what may not occur in several splits of the good rows."""
    rule, keep, config = scan.rule, rows.keep, scan.config
    overlap.splits.append(rows.splits[keep])
    overlap.rows.append(rule.contents(rows.batch)[keep])
    for name, hashes in ((config.id, overlap.ids), (config.group, overlap.groups)):
        if name:
            hashes.append(rule.identities(name, original, lines, unit)[keep])
    overlap.names = [name for name in scan.numeric if scan.types[name] in value_types.TIMES]
    times = [numbers[name][keep] for name in overlap.names]
    overlap.times.append(np.stack(times, axis=1) if times else np.empty((len(keep), 0)))


def as_declared(batch: pa.RecordBatch, scan: UnitScan) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
    """Return the batch in its declared or inferred types, and the rows by column that cannot be converted."""
    number_format, unreadable = NumberFormat.of(scan.config), {}
    stored = batch.schema.types
    for index, (name, kind) in enumerate(scan.types.items()):
        as_stored = name not in scan.config.types and value_types.column_type(stored[index]) == kind
        if kind == value_types.OTHER or (as_stored and not missing_marks(number_format, kind)):
            continue
        column, failed = retype_column(batch.column(index), kind, number_format)
        batch = batch.set_column(index, name, column)
        unreadable[name] = np.flatnonzero(failed)
    return batch, unreadable


def judge_rows(
    batch: pa.RecordBatch, numbers: dict[str, np.ndarray], unreadable: dict[str, np.ndarray], scan: UnitScan
) -> dict[int, tuple[str, str]]:
    """Return bad rows with column and reason: values of another type, or no target, weight or time."""
    reasons: dict[int, tuple[str, str]] = {}
    for name in sorted(unreadable):
        for row in unreadable[name].tolist():
            reasons.setdefault(row, (name, f"not {scan.types[name]}"))
    target = batch.column(scan.target)
    gaps = np.isnan(numbers[scan.target]) if scan.target in numbers else missing_texts(target, scan)
    for row in np.flatnonzero(gaps).tolist():
        reasons.setdefault(row, (scan.target, NO_TARGET))
    if scan.config.weight:
        weights = numbers[scan.config.weight]
        for row in np.flatnonzero(~(weights >= 0)).tolist():
            reason = "the weight is missing" if np.isnan(weights[row]) else "the weight is negative"
            reasons.setdefault(row, (scan.config.weight, reason))
    if scan.cuts:
        for row in np.flatnonzero(np.isnan(numbers[scan.config.time])).tolist():
            reasons.setdefault(row, (scan.config.time, "the time to split by is missing"))
    return reasons


def judge_sizes(numbers: dict[str, np.ndarray]) -> dict[int, tuple[str, str]]:
    """Return the rows with an infinite or huge number, with column and reason."""
    reasons: dict[int, tuple[str, str]] = {}
    for name, column in numbers.items():
        for row in np.flatnonzero(np.abs(column) > LARGEST).tolist():
            reasons.setdefault(row, (name, "infinite" if np.isinf(column[row]) else "too large for float32"))
    return reasons


def measure_rows(
    batch: pa.RecordBatch, numbers: dict[str, np.ndarray], first_row: int, splits: np.ndarray, rejected: Iterable[int]
) -> tuple[SplitRows, ColumnMoments]:
    """Return the rows without ``rejected``, and the moments of ``numbers`` by split."""
    rows = split_rows(batch, first_row, splits, np.array(sorted(rejected), np.int64))
    # Statistics of infinite values are not used.
    with np.errstate(invalid="ignore", over="ignore"):
        return rows, column_moments(list(numbers.values()), [chosen for _, chosen in rows.parts()])


def set_aside(
    original: pa.RecordBatch, reasons: dict[int, tuple[str, str]], lines: np.ndarray, unit: Unit, scan: UnitScan
) -> Iterator[BadRow]:
    """Yield the rows in ``reasons`` for the quarantine, with their original values."""
    for row in sorted(reasons):
        name, reason = reasons[row]
        raw = value_types.as_python(original.column(name).slice(row, 1))[0]
        if reason == NO_TARGET and scan.types[name] == value_types.TEXT and (mark := str(raw or "").strip()):
            reason = f"{NO_TARGET}: {mark!r} is in data.missing"
        yield BadRow(unit.file, int(lines[row]), name, reason, "" if raw is None else str(raw))


def missing_texts(column: pa.Array, scan: UnitScan) -> np.ndarray:
    texts = value_types.with_dictionary(column)
    absent = value_types.clean_texts(texts.dictionary.cast(pa.string()), scan.config.missing).is_null()
    return np.append(absent.to_numpy(zero_copy_only=False), True).take(value_types.dictionary_codes(texts))


def count_rows(rows: SplitRows, scan: UnitScan, result: ScanResult) -> None:
    """Count the rows by split and, unless the target is text, by class."""
    for split, chosen in rows.parts():
        result.rows[split] += len(chosen)
        if len(chosen) and scan.types[scan.target] != value_types.TEXT:
            target = rows.batch.column(scan.target).take(pa.array(chosen))
            result.classes[split].add(label_counts(target))


def count_texts(rows: SplitRows, counting: dict[str, CodeOccurrences], scan: UnitScan, result: ScanResult) -> None:
    """Count dictionary codes per column; they are converted to texts only when the dictionary changes."""
    parts = [chosen for _, chosen in rows.parts()]
    for name, kind in scan.types.items():
        if kind != value_types.TEXT:
            continue
        texts = value_types.with_dictionary(rows.batch.column(name))
        counts = counting.get(name)
        if counts is None or not counts.dictionary.equals(texts.dictionary):
            if counts is not None:
                add_dictionary_counts(name, counts, scan, result)
            counting[name] = counts = CodeOccurrences.nothing(texts.dictionary, len(SPLITS))
        counts.add(texts, parts)


def add_dictionary_counts(name: str, counts: CodeOccurrences, scan: UnitScan, result: ScanResult) -> None:
    column = result.texts[name]
    declared = scan.config.types.get(name)
    column.prose |= declared == "document" or (counts.prose and declared != "category")
    names = counts.dictionary.cast(pa.string())
    if not column.prose or name == scan.target:
        names = value_types.clean_texts(names, scan.config.missing)
    if column.prose:
        column.texts = TextOccurrences(column.texts.limit)
    else:
        found = counts.named(names, TRAIN)
        column.texts.add(found)
        if found and column.rules:
            allowed = spelling_rules(pa.array(found, pa.string()))
            column.rules = [rule for rule in column.rules if rule in allowed]
    rows, present = counts.by_code.sum(axis=1).tolist(), counts.present(names)
    column.missing = [old + a - b for old, a, b in zip(column.missing, rows, present, strict=True)]
    if name == scan.target:
        for split, classes in enumerate(result.classes):
            classes.add(counts.named(names, split))


def label_counts(target: pa.Array) -> dict[str, int]:
    """Return the number of occurrences by class name, for a target that is not text."""
    # A thousand are too many for classes, and enough to report that.
    values, counts = (each.slice(0, 1000) for each in pc.value_counts(target).flatten())
    return dict(zip(value_types.class_labels(values), counts.to_pylist(), strict=True))


def draw_sample(rows: SplitRows, numbers: dict[str, np.ndarray], scan: UnitScan, drawn: Drawn) -> None:
    """Append the batch's rows that belong to the sample to the chunks ``drawn``."""
    picked = row_keys(rows.first_row, rows.batch.num_rows, SAMPLE_SEED) <= scan.sampled_below
    chosen = np.sort(rows.keep[picked[rows.keep]])
    if len(chosen) == 0:
        return
    for name, kind in scan.types.items():
        if name in numbers:
            drawn[name].append(numbers[name].take(chosen))
        elif kind == value_types.TEXT:
            drawn[name].append(rows.batch.column(name).take(pa.array(chosen)).cast(pa.string()))
    drawn[SPLIT].append(rows.splits[chosen])


def sample_of(drawn: Drawn, scan: UnitScan) -> pa.RecordBatch:
    splits = np.concatenate(drawn[SPLIT])
    columns = {}
    for name, kind in scan.types.items():
        if kind == value_types.TEXT:
            texts = value_types.clean_texts(pa.concat_arrays(drawn[name]), scan.config.missing)
            columns[name] = pc.utf8_slice_codeunits(texts, 0, TEXT_IN_SAMPLE)
        elif kind == value_types.OTHER:
            columns[name] = pa.nulls(len(splits))
        else:
            columns[name] = pa.array(np.concatenate(drawn[name]), from_pandas=True)
    return pa.RecordBatch.from_pydict({**columns, SPLIT: splits})
