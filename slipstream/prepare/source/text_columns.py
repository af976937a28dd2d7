"""Columns of text in columnar files: what they hold is worked out as for CSV, so that either gives the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.number_formats import NumberFormat
from slipstream.prepare.columns.type_inference import guess_types, taken_as_text, tolerance
from slipstream.prepare.config import DataConfig
from slipstream.prepare.memory import Budget
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.source.columnar import Unit, head, read
from slipstream.prepare.workers.resume import ResumableScratch

#: The types are guessed from at most as many rows and bytes.
SAMPLE_ROWS = 1 << 11
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class TypeTrial:
    """The result of reading the texts of one unit as other types: the types, and which values cannot be read so."""

    types: dict[str, str]
    failures: dict[str, int]
    examples: dict[str, BadRow]


def infer_types(
    units: list[Unit], names: list[str], config: DataConfig, place: ResumableScratch
) -> tuple[dict[str, str], list[str]]:
    """What columns of text in columnar files hold, worked out as for CSV, and a word on some of them.

    The first rows tell what a column may be, and then all its values are tried.
    """
    if not units or not names:
        return {}, []
    first = [unit for unit in units if unit.file == units[0].file]
    types, warnings = guess_types(*sample_texts(first, names, config), config)
    guessed = {name: kind for name, kind in types.items() if kind != value_types.TEXT}
    if not guessed:
        return {}, warnings
    tried = list(place.map(try_types, ((unit, guessed, config) for unit in units)))
    rows = sum(unit.rows for unit in units)
    for name, kind in guessed.items():
        failures = sum(one.failures.get(name, 0) for one in tried)
        for one in tried:
            types[name] = value_types.wider(types[name], one.types[name]) or kind
        if failures > tolerance(config) * rows:
            example = next(one.examples[name] for one in tried if name in one.examples)
            warnings.append(taken_as_text(example, f"{failures:,} of {rows:,} values", kind))
            types[name] = value_types.TEXT
    return types, warnings


def sample_texts(
    units: list[Unit], names: list[str], config: DataConfig
) -> tuple[dict[str, pa.Array], str, np.ndarray]:
    """About as much as is looked at of a CSV, of the ``units`` of one file: columns, the file, and the lines."""
    most = min(SAMPLE_ROWS, Budget(config.memory).batch_rows(len(names)))
    parts, rows = [], 0
    for unit in units:
        if rows < most:
            batch = head(unit, names, most - rows)
            parts.append(pa.table({name: batch.column(name).cast(pa.string()) for name in names}))
            rows += batch.num_rows
    table = pa.concat_tables(parts)
    table = table.slice(0, max(1, table.num_rows * SAMPLE_BYTES // max(table.nbytes, SAMPLE_BYTES)))
    lines = np.concatenate([np.arange(unit.first_line, unit.first_line + unit.rows) for unit in units[: len(parts)]])
    return {name: table[name].combine_chunks() for name in names}, units[0].file, lines


def try_types(job: tuple[Unit, dict[str, str], DataConfig]) -> TypeTrial:
    """Read the texts of one unit as other types. Runs in a worker process."""
    unit, types, config = job
    number_format = NumberFormat.of(config)
    found, failures, examples = dict(types), Counter[str](), dict[str, BadRow]()
    for batch, lines in read(unit, list(types), Budget(config.memory)):
        for name, kind in types.items():
            texts = batch.column(name).cast(pa.string())
            values, failed = number_format.convert(texts, kind)
            found[name] = value_types.wider(found[name], value_types.type_of(values.type)) or kind
            rows = np.flatnonzero(failed)
            if len(rows):
                failures[name] += len(rows)
                example = BadRow(unit.file, int(lines[rows[0]]), name, f"not {kind}", texts[rows[0]].as_py())
                examples.setdefault(name, example)
    return TypeTrial(found, dict(failures), examples)
