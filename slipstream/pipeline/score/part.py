"""One part of a scored table: rows in, a Parquet file out, every row scored or quarantined.

The file's bytes depend only on data, model, settings and processor type, not on worker or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.pipeline.score.model import IMAGES, ServedModel
from slipstream.pipeline.score.plan import FILE, LABEL, PROBABILITY, ROW, VALUE, VERSION, ScoringPlan, ScoringPortion
from slipstream.pipeline.score.predict import BinCounter, Predictions, TablePredictor, TensorPredictor, table_predictor
from slipstream.pipeline.score.table_rows import (
    KEPT,
    FileBatch,
    RequestedColumns,
    TableBatch,
    kept_types,
    read_images,
    read_table,
    read_texts,
)
from slipstream.shared.artifacts.format import FileRecord, hash_file
from slipstream.shared.source.columns.number_formats import NumberFormat
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import TEXT
from slipstream.shared.storage import storage_for

#: Minimum rows per row group, except the last of a file.
GROUP_ROWS = 1 << 16
COMPRESSION = "zstd"
NOT_FINITE = "the model's output is not finite"
NO_ROWS = pa.table({})


@dataclass(frozen=True)
class ScorePartJob:
    """Job for one portion, with the model's directory and a scratch directory for the part."""

    plan: ScoringPlan
    portion: ScoringPortion
    model: Path
    scratch: Path


@dataclass(frozen=True)
class ScoredPart:
    """Result of scoring a portion.

    ``bad`` are quarantined rows, with file names relative to the data. ``file`` is None if no row was scored.
    ``counts`` are by the bins of the model's package.
    """

    number: int
    rows: int
    scored: int
    bad: list[BadRow]
    name: str = ""
    file: FileRecord | None = None
    counts: dict[str, np.ndarray] = field(default_factory=dict)


@lru_cache(maxsize=1)
def cached_model(directory: Path) -> ServedModel:
    """Return the model, cached for all parts of a process."""
    return ServedModel(directory)


@lru_cache(maxsize=1)
def predictor_of(directory: Path) -> TablePredictor:
    return table_predictor(cached_model(directory))


@lru_cache(maxsize=1)
def image_predictor_of(directory: Path) -> TensorPredictor:
    return TensorPredictor.of(cached_model(directory))


@dataclass(frozen=True)
class ScoredBatch:
    """Scored rows of a batch in the table's form, and the batch's statistics."""

    table: pa.Table
    read: int
    bad: list[BadRow]


def score_part(job: ScorePartJob) -> ScoredPart:
    """Score a portion and store its part; runs in a worker process."""
    plan, model = job.plan, cached_model(job.model)
    counting = counting_of(model)
    path = job.scratch / f"part-{job.portion.number:06d}.parquet"
    rows = 0
    bad: list[BadRow] = []
    with PartFile(path) as part:
        for batch in scored_batches(job, model, counting):
            part.add(batch.table)
            rows += batch.read
            bad += batch.bad
    if rows != part.rows + len(bad):
        raise RuntimeError(f"part {job.portion.number}: of {rows} rows {part.rows} were scored, {len(bad)} quarantined")
    names = {file.uri: plan.source.listing.relative(file) for file in job.portion.files}
    result = ScoredPart(
        job.portion.number,
        rows,
        part.rows,
        [BadRow(names.get(row.file, row.file), row.line, row.column, row.reason, row.raw) for row in bad],
        counts=counting.counts if counting else {},
    )
    return store_part(result, path, plan) if part.rows else result


def store_part(result: ScoredPart, path: Path, plan: ScoringPlan) -> ScoredPart:
    """Store the part under a name with its digest.

    So a worker on another processor type, with other bytes, overwrites no file.
    """
    record = hash_file(path)
    name = f"part-{result.number:06d}-{record.sha256[:16]}.parquet"
    storage_for(plan.output).put(f"{table_prefix(plan.key)}{name}", path)
    path.unlink(missing_ok=True)
    return ScoredPart(**{**vars(result), "name": name, "file": record})


def table_prefix(key: str) -> str:
    return f"tables/{key}/"


def counting_of(model: ServedModel) -> BinCounter | None:
    distributions = model.distributions
    missing = () if model.by == IMAGES else model.transform.missing
    return BinCounter(distributions, model.signature.classes, missing) if distributions else None


def scored_batches(job: ScorePartJob, model: ServedModel, counting: BinCounter | None) -> Iterator[ScoredBatch]:
    source, files = job.plan.source, job.portion.files
    if model.by == IMAGES:
        _, *shape = model.signature.inputs[0].shape
        (name,) = [given.name for given in model.signature.inputs]
        for pictures in read_images(files, source, (int(shape[0]), int(shape[1]), int(shape[2]))):
            pixels = pictures.content
            predicted = image_predictor_of(job.model)({name: np.asarray(pixels)}) if len(pixels) else None
            yield of_files(pictures, None, predicted, job, counting)
        return
    predictor = predictor_of(job.model)
    if source.kind == "documents":
        for texts in read_texts(files, source):
            rows = pa.RecordBatch.from_pydict({TEXT: pa.array(list(texts.content), pa.string())})
            yield of_files(texts, rows, predictor(rows) if len(rows) else None, job, counting)
        return
    wanted = requested_columns(model, kept_types(source, job.plan.config.keep, job.plan.deciding))
    for file in files:
        name = source.listing.relative(file)
        for batch in read_table(file, source, wanted):
            yield of_table(batch, name, predictor, wanted, job, counting)


def requested_columns(model: ServedModel, keep: dict[str, pa.DataType]) -> RequestedColumns:
    transform = model.transform
    marks = NumberFormat(transform.decimal, transform.thousands, tuple(transform.missing))
    spellings = {category.name: category.rule for category in transform.categorical}
    return RequestedColumns(model.types, keep, marks, spellings)


def of_table(
    batch: TableBatch,
    name: str,
    predictor: TablePredictor,
    wanted: RequestedColumns,
    job: ScorePartJob,
    counting: BinCounter | None,
) -> ScoredBatch:
    rows = batch.columns
    if not rows.num_rows:
        return ScoredBatch(NO_ROWS, batch.read, batch.bad)
    predicted = predictor(rows)
    if counting:
        counting.add(rows, predicted)
    kept = {kept: rows.column(KEPT + kept) for kept in wanted.keep}
    if not kept:
        kept = {FILE: pa.repeat(pa.scalar(name, pa.string()), rows.num_rows), ROW: pa.array(batch.numbers)}
    table, bad = finite_rows(part_table(kept, predicted, job), predicted, [batch.file] * rows.num_rows, batch.lines)
    return ScoredBatch(table, batch.read, batch.bad + bad)


def of_files(
    batch: FileBatch,
    rows: pa.RecordBatch | None,
    predicted: Predictions | None,
    job: ScorePartJob,
    counting: BinCounter | None,
) -> ScoredBatch:
    if predicted is None:
        return ScoredBatch(NO_ROWS, batch.read, batch.bad)
    if counting:
        counting.add(rows, predicted)
    names = {file.uri: job.plan.source.listing.relative(file) for file in job.portion.files}
    own = {
        FILE: pa.array([names.get(name, name) for name in batch.files], pa.string()),
        ROW: pa.array(batch.numbers, pa.int64()),
    }
    table, bad = finite_rows(part_table(own, predicted, job), predicted, batch.files, np.array(batch.numbers))
    return ScoredBatch(table, batch.read, batch.bad + bad)


def part_table(kept: dict[str, pa.Array], predicted: Predictions, job: ScorePartJob) -> pa.Table:
    """Return the part's table: kept columns, predictions, model version."""
    columns = {**kept, **prediction_columns(predicted, cached_model(job.model).signature.classes)}
    columns[VERSION] = pa.repeat(pa.scalar(job.plan.model.version, pa.string()), len(predicted.outputs))
    return pa.table(columns)


def prediction_columns(predicted: Predictions, classes: Sequence[str]) -> dict[str, pa.Array]:
    """Return label and probabilities, or the value."""
    outputs = predicted.outputs.astype(np.float64 if predicted.labels is None else np.float32, copy=False)
    columns = {} if predicted.labels is None else {LABEL: predicted.labels}
    names = [PROBABILITY + name for name in classes] or [VALUE]
    return columns | {name: pa.array(np.ascontiguousarray(outputs[:, index])) for index, name in enumerate(names)}


def finite_rows(
    table: pa.Table, predicted: Predictions, files: Sequence[str], lines: np.ndarray
) -> tuple[pa.Table, list[BadRow]]:
    good = np.isfinite(predicted.outputs).all(axis=1)
    if good.all():
        return table, []
    bad = [BadRow(files[row], int(lines[row]), "", NOT_FINITE, "") for row in np.flatnonzero(~good).tolist()]
    return table.filter(pa.array(good)), bad


class PartFile:
    """Writer of a Parquet file that is created with its first rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        #: Number of rows added.
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self.rows += table.num_rows
        self._waiting.append(table)
        if sum(each.num_rows for each in self._waiting) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        whole = pa.concat_tables(self._waiting)
        if self._writer is None:
            texts = [field.name for field in whole.schema if pa.types.is_string(field.type)]
            self._writer = pq.ParquetWriter(
                self._path,
                whole.schema,
                compression=COMPRESSION,
                use_dictionary=texts,
                write_page_checksum=True,
            )
        self._writer.write_table(whole, row_group_size=max(whole.num_rows, 1))
        self._waiting = []

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()
