"""Cost of preparing a customer table of 200 columns, by number of rows.

    python benchmarks/churn.py [OPTIONS]

The table is generated from a seed, in files of 500,000 rows. A file depends only on its number, so larger tables start
with the files of smaller ones. 150 columns are amounts (normal and log-normal, some with gaps), 29 are counts, 19 are
texts of 3 to 2,000 values, and one is the customer's number. ``churned`` is drawn with a probability that depends on
eleven numeric columns, products of two of them, and a text of 50 values. About 22 % of the customers churn, and even a
perfect model can predict only the probability.

A quarter, a half, and all of the rows are prepared in turns, each in a fresh process; the first turn is discarded. The
figures are medians of wall time and of the CPU time of all processes. "Of a line" is a median divided by its value on a
straight line fitted to the medians over the numbers of rows.
"""

from __future__ import annotations

import functools
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.command import benchmark
from harness.processes import alone
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, settled
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.source.config import DataConfig

FILE_ROWS = 500_000
AMOUNTS, COUNTS, TEXTS = 150, 29, 19
#: Numbers of distinct values of the text columns, repeated cyclically.
VALUES = (3, 8, 50, 400, 2_000)
GAPS = 0.03
#: Intercept of the logit, for a mean probability of about 22 %.
OFFSET = -1.5


def file_of(number: int, rows: int) -> pa.Table:
    draw = np.random.default_rng([number, 200])
    made: dict[str, pa.Array] = {"customer": pa.array(number * FILE_ROWS + np.arange(rows))}
    logit = np.full(rows, OFFSET)
    amounts = draw.standard_normal((AMOUNTS, rows), dtype=np.float32)
    weights = np.random.default_rng(200).normal(0, 0.7, 8)
    for place in range(AMOUNTS):
        values = np.exp(amounts[place]) if place % 3 == 2 else amounts[place]
        gaps = draw.random(rows, dtype=np.float32) < GAPS if place % 10 == 5 else None
        made[f"amount_{place:03d}"] = pa.array(values, mask=gaps)
    logit += weights @ amounts[: len(weights)]
    logit += 0.5 * amounts[0] * amounts[1] - 0.4 * np.abs(amounts[8] * amounts[9])
    for place in range(COUNTS):
        counts = draw.poisson(1 + 3 * (place % 7), rows)
        made[f"count_{place:02d}"] = pa.array(counts)
        if place == 0:
            logit += 0.3 * (counts - 1)
    for place in range(TEXTS):
        values = VALUES[place % len(VALUES)]
        codes = np.minimum(draw.geometric(3 / values, rows), values) - 1
        made[f"text_{place:02d}"] = pa.array([f"value {code}" for code in range(values)]).take(pa.array(codes))
        if place == 2:
            logit += np.random.default_rng(50).normal(0, 0.5, values)[codes]
    churned = draw.random(rows) < 1 / (1 + np.exp(-logit))
    made["churned"] = pa.array(["no", "yes"]).take(pa.array(churned.astype(np.int8)))
    return pa.table(made)


def make(place: Path, rows: int, file_rows: int = FILE_ROWS) -> list[Path]:
    """Write the files of a table of at least ``rows`` rows, and return their paths."""
    files = []
    for number in range(-(-rows // file_rows)):
        path = place / f"customers-{number:04d}.parquet"
        pq.write_table(file_of(number, file_rows), path, row_group_size=100_000)
        files.append(path)
    return files


def prepared(data: str) -> Figures:
    """Prepare ``data`` and return wall seconds, and CPU seconds of this process and its children."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        made_by = {"source": "benchmarks/churn.py"}
        prepare(Path(out) / "prepared", data, "churned", DataConfig(id="customer"), made_by, usable_cores())
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used),
    }


def measure(data: Path) -> Figures:
    figures = alone(prepared, str(data))
    click.echo(f"  {data.name:>12} {figures['seconds']:7.1f} s {figures['cpu_seconds']:7.1f} cpu s", err=True)
    return figures


COLUMNS = (
    Column("seconds", "seconds"),
    Column("of a line", "seconds_of_line", "{:.2f}"),
    Column("cpu s", "cpu_seconds"),
    Column("of a line", "cpu_seconds_of_line", "{:.2f}"),
)


@benchmark
@click.option("--rows", default=2_000_000, show_default=True, help="Rows of the largest part.")
@click.option("--runs", default=3, show_default=True, help="Measured turns.")
@click.option("--keep", type=click.Path(path_type=Path), help="Only write the table to this directory.")
def main(quick: bool, rows: int, runs: int, keep: Path | None) -> Iterator[Table]:
    """Measure how the cost of preparing a table of 200 columns grows with its rows."""
    file_rows = 300 if quick else FILE_ROWS
    if keep:
        keep.mkdir(parents=True)
        make(keep, rows)
        return
    with tempfile.TemporaryDirectory(prefix="churn-") as place:
        files = make(Path(place), 4 * file_rows if quick else rows, file_rows)
        parts = {}
        for share in (4, 2, 1):
            its = files[: max(1, len(files) // share)]
            parts[len(its) * file_rows] = part = Path(place) / str(len(its) * file_rows)
            part.mkdir()
            for file in its:
                (part / file.name).hardlink_to(file)
        turns = in_turns(
            {f"{n:,}": functools.partial(measure, part) for n, part in parts.items()}, 1 if quick else runs + 1
        )
        found = {name: settled(taken) for name, taken in turns.items()}
        for key in ("seconds", "cpu_seconds"):
            taken = [figures[key] for figures in found.values()]
            line = np.polyval(np.polyfit(list(parts), taken, 1), list(parts))
            for figures, expected in zip(found.values(), line, strict=True):
                figures[f"{key}_of_line"] = figures[key] / float(expected)
    yield Table("Preparing customers, 200 columns", COLUMNS, found)


if __name__ == "__main__":
    main()
