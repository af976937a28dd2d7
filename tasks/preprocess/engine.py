"""Raw data to prepared data: open, survey, fit, encode, merge."""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.artifact import Artifact, ArtifactWriter, FileRecord
from tasks.errors import UserError
from tasks.preprocess import quarantine, values
from tasks.preprocess.card import make_card, row_counts
from tasks.preprocess.columnar import Unit, batch_rows, read
from tasks.preprocess.config import DataConfig
from tasks.preprocess.digits import load
from tasks.preprocess.fit import check_values, fit
from tasks.preprocess.hashing import hash_rows
from tasks.preprocess.ingest import Source, header_hint, open_source
from tasks.preprocess.page import render
from tasks.preprocess.prepared import KIND, SPLITS, TARGET, WEIGHT, Signature, TensorSpec
from tasks.preprocess.progress import say_goes_on, shown
from tasks.preprocess.shards import Run, RunWriter, merge, order_keys
from tasks.preprocess.spelling import Spelling, retype
from tasks.preprocess.split import TRAIN, Cuts, assign, find_cuts
from tasks.preprocess.survey import Found, Survey, as_declared, split_rows, survey_unit
from tasks.preprocess.transform import Transform
from tasks.preprocess.workers import Workers
from tasks.preprocess.workplace import Workplace, workplace

SCRATCH = ".scratch"
#: Quarantined rows that the page lists; all are in quarantine.parquet.
LISTED = 50


def prepare(
    directory: Path,
    data: str,
    target: str,
    config: DataConfig,
    made_by: Mapping[str, Any],
    workers: int = 1,
    kept: Path | None = None,
) -> Artifact:
    """Make the prepared data in the fresh ``directory``. Empty ``data`` means the digits of scikit-learn.

    The same data and config give the same bytes on any number of ``workers``. What is finished lies in
    the directory ``kept``, on the same disk, until all is: a run that was killed goes on from there if it is given the
    same one again, which must be another for other bytes, another config or other code. By default it lies in
    ``directory``. Raises ``UserError`` for what is wrong with the data.
    """
    writer = ArtifactWriter(directory)
    try:
        with closing(Workers(workers)) as processes, workplace(kept or directory / SCRATCH, processes) as place:
            if data:
                prepare_table(writer, place, data, target, config)
            else:
                prepare_digits(writer, place, config)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"{directory}: no space left on the disk; free some or work in another directory") from None
    return writer.finish(KIND, made_by)


# Tables


@dataclass(frozen=True)
class Encoding:
    """What a worker needs to encode a unit."""

    survey: Survey
    transform: Transform
    scratch: Path


@dataclass(frozen=True)
class Encoded:
    """What became of a unit: sorted runs, all in one pair of files."""

    runs: list[Run]

    @property
    def files(self) -> list[str]:
        return sorted({f"{run.path}.{part}" for run in self.runs for part in ("rows", "keys")})


@dataclass(frozen=True)
class Merging:
    """The runs of one split, to become the file ``name`` of records of ``itemsize`` bytes in ``directory``."""

    directory: Path
    name: str
    runs: list[Run]
    itemsize: int


@dataclass(frozen=True)
class Merged:
    """A split as it will be in the artifact."""

    file: Path
    record: FileRecord

    @property
    def files(self) -> list[Path]:
        return [self.file]


def prepare_table(writer: ArtifactWriter, place: Workplace, data: str, target: str, config: DataConfig) -> None:
    source = open_source(data, config, place)
    dropped = check_columns(source, data, target, config)
    say_goes_on(place.found, place.asked + 2 * len(source.units) + len(SPLITS))
    types = {name: kind for name, kind in source.types.items() if name not in dropped}
    survey = Survey(types, target, source.rows, config, time_cuts(source, config))
    found = Found.nothing(survey)
    rows = [unit.rows for unit in source.units]
    for part in shown("survey", place.map(survey_unit, ((survey, unit) for unit in source.units)), rows):
        found.merge(part)
    check_values(found, target)
    bad = source.bad + found.bad
    quarantine.check_limit(bad, source.read, config.quarantine_limit)
    fitted = fit(found, types, target, config)
    encoding = Encoding(survey, fitted.transform, place.root)
    with ThreadPoolExecutor(1) as beside:
        # This process waits for the others while they encode: time enough for the card.
        card = beside.submit(make_card, Path(data).name, source, found, fitted, dropped)
        runs = encode_units(encoding, source, found, place)
    signature = fitted.transform.signature
    merge_splits(writer, place, runs, signature)
    quarantine.write(writer, bad)
    writer.write_json("signature.json", signature.to_json())
    writer.write_json("statistics.json", fitted.transform.to_json())
    columns = [
        {"name": name, "type": kind, "role": fitted.roles[name].role if name in fitted.roles else "dropped"}
        for name, kind in source.types.items()
    ]
    writer.write_json("schema.json", {"columns": columns, "target": target, "missing": config.missing})
    write_card(writer, card.result(), bad)


def check_columns(source: Source, data: str, target: str, config: DataConfig) -> list[str]:
    """The columns to leave out. Raises ``UserError`` unless the target and the columns in the config exist."""
    names = list(source.types)
    if not target:
        raise UserError(f"target: name the column to predict with --target; {data!r} has {listed(names)}")
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
            raise UserError(f"{setting}: {data!r} has no column {name!r}; {hint}{shape_hint(names, config)}")
    if target in (*aside.values(), *config.drop):
        raise UserError(
            f"target: {target!r} is also data.id, group, time, weight or in data.drop; expected another column"
        )
    for setting, name in aside.items():
        if name in config.drop:
            raise UserError(f"data.drop: {name!r} is needed as data.{setting}, and is no feature anyway")
    if config.weight and source.types[config.weight] not in (values.INTEGER, values.NUMBER):
        kind = source.types[config.weight]
        raise UserError(f"data.weight: {config.weight!r} holds {kind} values; expected numbers from 0 on")
    if config.time and source.types[config.time] in (values.TEXT, values.OTHER):
        kind = source.types[config.time]
        raise UserError(f"data.time: {config.time!r} holds {kind} values; expected dates, times or numbers")
    if source.types[target] == values.OTHER:
        raise UserError(f"target: {target!r} holds neither numbers nor texts")
    return [name for name in names if name in config.drop]


def time_cuts(source: Source, config: DataConfig) -> Cuts | None:
    """Where time is cut into splits, if it is: as configured, else by the shares of all rows."""
    if not config.time:
        return None
    if config.split.test_from:
        return config.split.cuts
    kind, spelling = source.types[config.time], Spelling.of(config)
    parts = [
        values.as_numbers(retype(batch.column(0), kind, spelling)[0])
        for unit in source.units
        for batch, _ in read(unit, [config.time], 1 << 16)
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


def encode_units(encoding: Encoding, source: Source, found: Found, place: Workplace) -> list[Run]:
    """The second pass: every row encoded, in sorted runs."""
    jobs = ((encoding, unit, rejected) for unit, rejected in zip(source.units, found.rejected, strict=True))
    rows = [unit.rows for unit in source.units]
    return [run for part in shown("encode", place.map(encode_unit, jobs), rows) for run in part.runs]


def encode_unit(job: tuple[Encoding, Unit, np.ndarray]) -> Encoded:
    """Encode one unit into sorted runs. Runs in a worker process."""
    encoding, unit, rejected = job
    survey, transform = encoding.survey, encoding.transform
    record = transform.signature.record
    done = 0
    with RunWriter(encoding.scratch / f"run-{unit.first_row:012d}") as writer:
        for original, _ in read(unit, list(survey.types), batch_rows(len(survey.types))):
            batch, _ = as_declared(original, survey)
            here = rejected[(rejected >= done) & (rejected < done + batch.num_rows)] - done
            rows = split_rows(batch, unit.first_row + done, survey, here)
            order = order_keys(rows.first_row, batch.num_rows, survey.rows, survey.config.shuffle)
            records = np.zeros(batch.num_rows, record)
            encode(transform, batch, records, rows.keep)
            for split, chosen in rows.parts():
                writer.add(split, chosen, order, records)
            done += batch.num_rows
    return Encoded(writer.runs)


def encode(transform: Transform, batch: pa.RecordBatch, records: np.ndarray, keep: np.ndarray) -> None:
    """Inputs and weights of all rows and targets of those to ``keep`` into ``records``."""
    transform.encode(batch, records)
    target = batch.column(transform.target).take(pa.array(keep))
    records[TARGET][keep] = transform.encode_target(target)
    if transform.weight:
        records[WEIGHT] = transform.encode_weight(batch.column(transform.weight))


def merge_splits(writer: ArtifactWriter, place: Workplace, runs: list[Run], signature: Signature) -> None:
    def merged(index: int) -> Merged:
        split, mine = SPLITS[index], [run for run in runs if run.split == index]
        job = Merging(place.root / split, f"{split}-00000.rows", mine, signature.record.itemsize)
        return place.once(f"merge-{split}", merge_split, job)

    with ThreadPoolExecutor(len(SPLITS)) as beside:
        found = list(beside.map(merged, range(len(SPLITS))))
    for done in found:
        writer.adopt(done.file, done.file.name, done.record)


def merge_split(job: Merging) -> Merged:
    shutil.rmtree(job.directory, ignore_errors=True)
    writer = ArtifactWriter(job.directory)
    merge(writer, job.name, job.runs, job.itemsize)
    return Merged(job.directory / job.name, writer.record(job.name))


def write_card(writer: ArtifactWriter, card: dict[str, Any], bad: list[quarantine.BadRow]) -> None:
    writer.write_json("card.json", card)
    writer.write_bytes("card.html", render(card, bad[:LISTED]).encode())


# The digits


def prepare_digits(writer: ArtifactWriter, place: Workplace, config: DataConfig) -> None:
    pixels, labels = load()
    flat = pixels.reshape(len(pixels), -1)
    hashes = hash_rows([(str(place), pa.array(flat[:, place])) for place in range(flat.shape[1])], len(flat))
    splits = assign(hashes, config.split)
    train = pixels[splits == TRAIN].astype(np.float64)
    classes = tuple(str(digit) for digit in range(10))
    signature = Signature(
        inputs=(TensorSpec("image", "uint8", pixels.shape[1:]),),
        task="classification",
        target="digit",
        classes=classes,
        image_mean=(float(train.mean()),),
        image_std=(float(train.std()),),
    )
    records = np.zeros(len(pixels), signature.record)
    records["image"], records[TARGET] = pixels, labels
    order = order_keys(0, len(pixels), len(pixels), config.shuffle)
    with RunWriter(place.root / "run") as runs:
        for split in range(len(SPLITS)):
            runs.add(split, np.flatnonzero(splits == split), order, records)
    merge_splits(writer, place, runs.runs, signature)
    quarantine.write(writer, [])
    counts = np.array([[np.sum((splits == s) & (labels == c)) for s in range(len(SPLITS))] for c in range(10)])
    column = {"name": "image", "type": "uint8 1x8x8", "missing": 0, "min": int(pixels.min()), "max": int(pixels.max())}
    writer.write_json("signature.json", signature.to_json())
    writer.write_json("statistics.json", {"image_mean": signature.image_mean, "image_std": signature.image_std})
    writer.write_json(
        "schema.json", {"columns": [{"name": "image", "type": "image", "role": "image"}], "target": "digit"}
    )
    card = {
        "source": "handwritten digits (scikit-learn)",
        "rows": row_counts(len(pixels), counts.sum(axis=0).tolist(), 0),
        "task": signature.task,
        "target": signature.target,
        "columns": [column | {"role": "image", "mean": float(train.mean()), "std": float(train.std())}],
        "classes": {
            name: dict(zip(SPLITS, row, strict=True)) for name, row in zip(classes, counts.tolist(), strict=True)
        },
        "warnings": [],
    }
    write_card(writer, card, [])
