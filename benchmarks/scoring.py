"""Scoring of a table, compared with the sum of its parts and with pandas and one call of the model.

    python benchmarks/scoring.py [OPTIONS]

Parquet of 13 columns (8 floats, 2 integers, 2 texts, an id) and of 200 (150, 29, 20, an id) goes through the raw model
(which takes unprepared columns) of an MLP of the default size, FP32, with one thread. "ours" is the whole scoring: the
model is fetched and verified, rows are counted for drift, parts are hashed and published. "apart" is the sum of
reading, converting, running (with our number of rows per call) and writing, timed separately over the same rows.
"pandas" reads the file, fills missing values, calls the model once with all rows and writes the frame. "ours, a
quarter" has a quarter of the rows. Contenders take turns in fresh processes; the first turn is discarded. Reported are
medians of CPU seconds without imports, and of peak resident memory with imports.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.command import benchmark, part_option
from harness.models import train
from harness.scoring import APART, CONTENDERS, OURS, PANDAS, PARTS, QUARTER, in_child
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, interval_of_median, settled
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.distributed.child_processes import no_main_module
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.source.config import DataConfig

#: Numbers of floats, integers and texts, without the id.
WIDTHS = {"13": (8, 2, 2), "200": (150, 29, 20)}
ROWS = {"13": 1_000_000, "200": 120_000}
TRAINING_ROWS, GROUP_ROWS = 6_000, 50_000
#: Speedup that no quantised variant reaches, so that the model stays FP32 on every machine.
NEVER = 1e6


def columns(rows: int, seed: int, widths: tuple[int, int, int], target: bool) -> pa.Table:
    floats, integers, texts = widths
    draw = np.random.default_rng(seed)
    made: dict[str, Any] = {"id": pa.array([f"{seed}-{row}" for row in range(rows)])}
    for place in range(floats):
        numbers = draw.normal(place, 1 + place, rows)
        made[f"f{place}"] = pa.array(numbers, mask=draw.random(rows) < 0.02) if place % 5 == 0 else numbers
    for place in range(integers):
        made[f"i{place}"] = draw.integers(0, 100, rows)
    for place in range(texts):
        names = pa.array([f"value {number}" for number in range(20)])
        made[f"t{place}"] = names.take(pa.array(draw.integers(0, len(names), rows)))
    if target:
        made["y"] = pa.array(["no", "yes"]).take(pa.array((np.asarray(made["i0"]) + draw.normal(0, 20, rows) > 50) * 1))
    return pa.table(made)


def make_package(directory: Path, widths: tuple[int, int, int], quick: bool) -> Path:
    """Train a model briefly on a table of these ``widths``, and return the exported package."""
    pq.write_table(columns(1_500 if quick else TRAINING_ROWS, 0, widths, target=True), directory / "train.parquet")
    prepared, trained = directory / "prepared", directory / "trained"
    prepare(prepared, str(directory / "train.parquet"), "y", DataConfig(id="id"), {}, 1)
    model = train(prepared, trained, ModelConfig(), TrainingConfig(epochs=1))
    config = ExportConfig(seconds=1.0, min_speedup=NEVER)
    engine.export(directory / "package", model, PreparedData.open(prepared), config, {})
    return directory / "package"


def write_rows(directory: Path, rows: int, widths: tuple[int, int, int]) -> Path:
    """Write ``rows`` rows in four Parquet files of equal size, with row groups of usual size."""
    directory.mkdir()
    for file in range(4):
        writer = None
        for start in range(0, rows // 4, GROUP_ROWS):
            seed = 1 + file * rows + start
            table = columns(min(GROUP_ROWS, rows // 4 - start), seed, widths, target=False)
            writer = writer or pq.ParquetWriter(directory / f"{file}.parquet", table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
    return directory


# Measuring


def measure(contender: str, package: Path, data: Path, start_method: str) -> Figures:
    """Measure one contender in a fresh process with one thread for linear algebra."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "figures.json")
        context: Any = multiprocessing.get_context(start_method)
        process = context.Process(target=in_child, args=(contender, package, data, target))
        with no_main_module():
            process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{contender} failed with exit code {process.exitcode}")
        figures: Figures = json.loads(target.read_text(encoding="utf-8"))
    click.echo(f"  {contender:<16} {figures['cpu_seconds']:7.2f} cpu s", err=True)
    return figures


COLUMNS = (
    Column("rows per cpu s", "rows_per_second", "{:,.0f}"),
    *(Column(part, part, "{:.2f}") for part in PARTS),
    Column("GiB", "bytes", "{:.2f}", 1 << 30),
    Column("cpu x apart", "over_apart", "{:.2f}"),
    Column("from", "over_apart_low", "{:.2f}"),
    Column("to", "over_apart_high", "{:.2f}"),
    Column("rows x pandas", "rows_over_pandas", "{:.2f}"),
    Column("from", "rows_over_pandas_low", "{:.2f}"),
    Column("to", "rows_over_pandas_high", "{:.2f}"),
    Column("memory x pandas", "bytes_over_pandas", "{:.2f}"),
    Column("memory x a quarter", "bytes_over_quarter", "{:.2f}"),
)
BARS = (
    "bars for ours: cpu at most 1.20 x apart, rows at least 1.40 x pandas, memory at most 0.25 x pandas and 1.10 x a "
    "quarter of the rows"
)


def compare(name: str, directory: Path, quick: bool, turns: int) -> Table:
    rows = 8_000 if quick else ROWS[name]
    package = make_package(directory, WIDTHS[name], quick)
    data = write_rows(directory / "rows", rows, WIDTHS[name])
    # A new interpreter has no modules of another contender, so its memory is comparable.
    start_method = "forkserver" if quick else "spawn"
    work = {
        name: functools.partial(measure, name, package, data / "0.parquet" if name == QUARTER else data, start_method)
        for name in CONTENDERS
    }
    found = in_turns(work, turns)
    figures = {contender: settled(taken) for contender, taken in found.items()}
    for contender, each in figures.items():
        each["rows_per_second"] = (rows / 4 if contender == QUARTER else rows) / each["cpu_seconds"]
    mine = figures[OURS]
    for word, peer, turn_over in (("over_apart", APART, False), ("rows_over_pandas", PANDAS, True)):
        pairs = zip(found[OURS], found[peer], strict=True)
        ratios = [
            its["cpu_seconds"] / our["cpu_seconds"] if turn_over else our["cpu_seconds"] / its["cpu_seconds"]
            for our, its in pairs
        ]
        ratio, low, high = interval_of_median(ratios[1:] or ratios)
        mine |= {word: ratio, f"{word}_low": low, f"{word}_high": high}
    mine["bytes_over_pandas"] = mine["bytes"] / figures[PANDAS]["bytes"]
    mine["bytes_over_quarter"] = mine["bytes"] / figures[QUARTER]["bytes"]
    return Table(f"Scoring, {rows:,} x {name}", COLUMNS, figures, (BARS,))


@benchmark
@part_option(WIDTHS)
@click.option("--runs", default=5, show_default=True, help="Measured turns.")
def main(quick: bool, parts: tuple[str, ...], runs: int) -> Iterator[Table]:
    """Measure the cost of scoring a table."""
    for name in parts[:1] if quick else parts:  # other widths run the same code
        with tempfile.TemporaryDirectory(prefix="scoring-") as directory:
            yield compare(name, Path(directory), quick, 1 if quick else runs + 1)


if __name__ == "__main__":
    main()
