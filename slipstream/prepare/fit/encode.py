"""The second pass: every row encoded, into sorted runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from slipstream.artifacts.prepared.data import TARGET, WEIGHT
from slipstream.prepare.columns.transform import Transform
from slipstream.prepare.fit.scan import Rows, Scan, read_again
from slipstream.prepare.shuffle import Run, RunWriter, order_keys
from slipstream.prepare.source.columnar import Unit
from slipstream.prepare.workers.resume import ResumableScratch


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


def encode_units(
    scratch: ResumableScratch, scan: Scan, transform: Transform, units: list[Unit], rejected: list[np.ndarray]
) -> Iterator[EncodedUnit]:
    """Encode all rows but the ``rejected`` ones of each unit."""
    plan = EncodingPlan(scan, transform, scratch.root)
    return scratch.map(encode_unit, ((plan, *pair) for pair in zip(units, rejected, strict=True)))


def encode_unit(job: tuple[EncodingPlan, Unit, np.ndarray]) -> EncodedUnit:
    """Encode one unit into sorted runs. Runs in a worker process."""
    plan, unit, rejected = job
    scan, transform = plan.scan, plan.transform
    # For all batches: the system would clear fresh memory for each of them.
    room = np.zeros(min(unit.rows, scan.batch_rows), transform.signature.record)
    with RunWriter(plan.scratch / f"run-{unit.first_row:012d}") as writer:
        for rows in read_again(scan, unit, rejected):
            order = order_keys(rows.first_row, rows.batch.num_rows, scan.rows, scan.config.shuffle)
            records = room[: rows.batch.num_rows]
            encode(transform, rows, scan.numbers(rows.batch), records)
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
