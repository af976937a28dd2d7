"""Preparing a table beside Polars (streaming) and pandas written by hand for the same.

    python benchmarks/preprocess.py [--quick] [--json FILE] [--part parquet|csv|linear] [--runs N]

``parquet``: 2 M rows of 150 float64, 30 int64 (one of them the id) and 20 texts become standardised float32 and codes,
with statistics of the training rows (exact medians among them), split by the id; ours also shuffles, hashes and checks,
the others do not. Polars takes part a second time without the medians, which cost it about half of its time.
``csv``: 500 k rows of 200 columns, one in a thousand with a value that is no number, become typed columns; ours sets
the bad rows aside by line, Polars' bare sink drops nothing and reads them as null. ``linear``: rows of 50 columns,
doubled again and again, against a straight line. Contenders take turns, each in a fresh process; the first turn is
discarded; reported are medians. Memory is the peak of the proportional set size of the process and its children, so
that shared pages count once.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tasks.hardware.cpus import usable_cores
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.preprocess.pool.resume import workplace
from tasks.preprocess.pool.workers import Workers
from tasks.preprocess.read.files import list_source
from tasks.preprocess.read.tables import open_source

#: How many columns hold numbers, whole numbers (the id among them) and texts (the target among them).
WIDE, NARROW = (150, 30, 20), (38, 7, 5)
GROUP_ROWS = 100_000
BAD_SHARE = 1e-3


# The data


def columns(rows: int, first: int, widths: tuple[int, int, int]) -> dict[str, Any]:
    """The rows from number ``first`` on: normal floats with gaps, whole numbers, categories of growing number."""
    floats, integers, texts = widths
    draw = np.random.default_rng(first)
    made: dict[str, Any] = {"id": np.arange(first, first + rows)}
    for place in range(floats):
        numbers = draw.normal(place, 1 + place, rows)
        made[f"f{place}"] = pa.array(numbers, mask=draw.random(rows) < 0.02) if place % 10 == 0 else numbers
    for place in range(integers - 1):
        made[f"i{place}"] = draw.integers(0, 10 ** (1 + place % 6), rows)
    for place in range(texts - 1):
        names = pa.array([f"value {number}" for number in range(5 * (1 + place) ** 2)])
        made[f"t{place}"] = names.take(pa.array(draw.integers(0, len(names), rows)))
    made["y"] = pa.array(["no", "yes"]).take(pa.array(draw.integers(0, 2, rows)))
    return made


def make_parquet(path: Path, rows: int, widths: tuple[int, int, int] = WIDE) -> None:
    writer = None
    for first in range(0, rows, GROUP_ROWS):
        table = pa.table(columns(min(GROUP_ROWS, rows - first), first, widths))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def make_csv(path: Path, rows: int) -> None:
    """As CSV, with a text in place of a number in one row of a thousand."""
    draw = np.random.default_rng(1)
    writer = None
    for first in range(0, rows, GROUP_ROWS):
        table = pa.table(columns(min(GROUP_ROWS, rows - first), first, WIDE))
        for place in range(WIDE[0]):
            bad = draw.random(table.num_rows) < BAD_SHARE / WIDE[0]
            if bad.any():
                texts = pa.compute.if_else(pa.array(bad), "n.k.", table[f"f{place}"].cast(pa.string()))
                table = table.set_column(1 + place, f"f{place}", texts)
            else:
                table = table.set_column(1 + place, f"f{place}", table[f"f{place}"].cast(pa.string()))
        writer = writer or pacsv.CSVWriter(path, table.schema, write_options=pacsv.WriteOptions(quoting_style="none"))
        writer.write(table)
    assert writer is not None
    writer.close()


# The contenders: each reads ``data`` and writes below ``out``


def ours(data: Path, out: Path, shuffle: bool = True) -> None:
    prepare(out / "prepared", str(data), "y", DataConfig(id="id", shuffle=shuffle), {}, usable_cores())


def ours_in_order(data: Path, out: Path) -> None:
    ours(data, out, shuffle=False)


def ours_ingest(data: Path, out: Path) -> None:
    with closing(Workers(usable_cores())) as workers, workplace(out, workers) as place:
        source = open_source(list_source(str(data)), DataConfig(id="id"), place)
    assert source.read == source.rows + len(source.bad)


def polars(data: Path, out: Path, medians: bool = True) -> None:
    """Two streaming passes: statistics of the training rows, then one uncompressed file per split."""
    import polars as pl

    lazy = pl.scan_parquet(data) if data.suffix == ".parquet" else pl.scan_csv(data, ignore_errors=True)
    share = (pl.col("id").hash(seed=0) % 10_000) / 10_000
    split = pl.when(share < 0.15).then(2).when(share < 0.3).then(1).otherwise(0)
    schema = lazy.collect_schema()
    numbers = [n for n, kind in schema.items() if kind.is_numeric() and n != "id"]
    texts = [n for n, kind in schema.items() if kind == pl.String]
    wanted = POLARS_FIGURES if medians else POLARS_FIGURES[:-1]
    figures = [getattr(pl.col(numbers), figure)().name.suffix(f" {figure}") for figure in wanted]
    counted = [pl.col(n).value_counts(sort=True).implode().alias(n) for n in texts]
    found = lazy.filter(split == 0).select(*figures, *counted).collect(engine="streaming").row(0, named=True)
    encoded = [((pl.col(n) - found[f"{n} mean"]) / found[f"{n} std"]).fill_null(0).cast(pl.Float32) for n in numbers]
    for n in texts:
        words = [entry[n] for entry in found[n] if entry[n] is not None]
        codes = pl.col(n).replace_strict(words, range(2, len(words) + 2), default=1, return_dtype=pl.Int32)
        encoded.append(codes.fill_null(0))
    sinks = [
        lazy.filter(split == part)
        .select(encoded)
        .sink_ipc(out / f"{part}.arrow", compression="uncompressed", lazy=True)
        for part in range(3)
    ]
    pl.collect_all(sinks, engine="streaming")


POLARS_FIGURES = ("mean", "std", "min", "max", "null_count", "median")


def polars_without_medians(data: Path, out: Path) -> None:
    polars(data, out, medians=False)


def polars_sink(data: Path, out: Path) -> None:
    import polars as pl

    pl.scan_csv(data, ignore_errors=True).sink_parquet(out / "typed.parquet")


def pandas(data: Path, out: Path) -> None:
    import pandas as pd

    frame = pd.read_parquet(data) if data.suffix == ".parquet" else pd.read_csv(data, low_memory=False)
    for name in frame.select_dtypes(exclude="number"):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        if numbers.notna().mean() > 0.5:  # a few bad values made the column one of texts
            frame[name] = numbers
    share = pd.util.hash_pandas_object(frame.pop("id"), index=False).to_numpy() % 10_000 / 10_000
    split = np.where(share < 0.15, 2, np.where(share < 0.3, 1, 0))
    train = frame[split == 0]
    encoded = np.empty(frame.shape, np.float32)
    for place, name in enumerate(frame):
        if pd.api.types.is_numeric_dtype(frame[name]):
            figures = train[name].agg(["mean", "std", "min", "max", "count", "median"])
            encoded[:, place] = ((frame[name] - figures["mean"]) / figures["std"]).fillna(0)
        else:
            words = train[name].value_counts().index
            encoded[:, place] = frame[name].map(dict(zip(words, range(2, len(words) + 2), strict=True))).fillna(1)
    for part in range(3):
        encoded[split == part].tofile(out / f"{part}.rows")


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "ours": ours,
    "ours, in order": ours_in_order,
    "ours, ingest": ours_ingest,
    "polars": polars,
    "polars, no medians": polars_without_medians,
    "polars, bare sink": polars_sink,
    "pandas": pandas,
}


# Measuring


def processes_below(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        now = waiting.pop()
        found.append(now)
        for path in Path(f"/proc/{now}/task").glob("*/children"):
            waiting += [int(child) for child in path.read_text().split()]
    return found


def proportional_bytes(pid: int) -> int:
    """What a process and its children hold in memory, shared pages counted once."""
    total = 0
    try:
        for each in processes_below(pid):
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) << 10
    except (OSError, StopIteration):
        pass  # a process has just ended
    return total


def measure(contender: str, data: Path) -> dict[str, float]:
    """Seconds, processor seconds and peak bytes of one contender in a fresh process, start-up included."""
    with tempfile.TemporaryDirectory(dir=data.parent) as out:
        command = [sys.executable, __file__, "--contender", contender, "--data", str(data), "--out", out]
        before, started, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
        process = subprocess.Popen(command)
        while process.poll() is None:
            peak = max(peak, proportional_bytes(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode:
        raise SystemExit(f"{contender} failed with {process.returncode}")
    return {"seconds": seconds, "cpu seconds": busy, "bytes": peak}


def in_turns(contenders: list[str], data: Path, runs: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(runs + 1):
        for name in contenders:
            figures = measure(name, data)
            memory = f"{figures['bytes'] / 2**30:5.2f} GiB"
            click.echo(
                f"  {name:<18} {figures['seconds']:7.1f} s  {figures['cpu seconds']:7.1f} cpu s  {memory}", err=True
            )
            if turn:
                taken[name].append(figures)
    return {
        name: {key: statistics.median(run[key] for run in all_runs) for key in all_runs[0]}
        for name, all_runs in taken.items()
    }


def table(title: str, found: dict[str, dict[str, float]], beside: str) -> None:
    click.echo(f"\n{title}\n{'':<20}{'seconds':>9}{'cpu s':>9}{'GiB':>8}{'x ' + beside:>22}{'cpu':>9}{'memory':>9}")
    for name, figures in found.items():
        ratio, busy, memory = (figures[key] / found[beside][key] for key in ("seconds", "cpu seconds", "bytes"))
        taken = f"{figures['seconds']:9.1f}{figures['cpu seconds']:9.1f}{figures['bytes'] / 2**30:8.2f}"
        click.echo(f"{name:<20}{taken}{ratio:22.2f}{busy:9.2f}{memory:9.2f}")


def parquet_part(scratch: Path, quick: bool, runs: int) -> dict[str, Any]:
    rows = 200_000 if quick else 2_000_000
    make_parquet(scratch / "t.parquet", rows)
    found = in_turns(["ours", "ours, in order", "polars", "polars, no medians", "pandas"], scratch / "t.parquet", runs)
    table(f"Parquet, {rows:,} x {sum(WIDE)}", found, "polars")
    return found


def csv_part(scratch: Path, quick: bool, runs: int) -> dict[str, Any]:
    rows = 50_000 if quick else 500_000
    make_csv(scratch / "t.csv", rows)
    found = in_turns(["ours, ingest", "polars, bare sink", "ours", "pandas"], scratch / "t.csv", runs)
    table(f"CSV, {rows:,} x {sum(WIDE)}", found, "polars, bare sink")
    return found


def linear_part(scratch: Path, quick: bool, runs: int) -> dict[str, Any]:
    base = 50_000 if quick else 1_000_000
    found = {}
    for rows in (base, 2 * base, 4 * base, 8 * base):
        path = scratch / "t.parquet"
        make_parquet(path, rows, NARROW)
        found[f"{rows:,}"] = in_turns(["ours"], path, runs)["ours"]
    counts = np.array([int(name.replace(",", "")) for name in found], float)
    seconds = np.array([figures["seconds"] for figures in found.values()])
    line = np.polyval(np.polyfit(counts, seconds, 1), counts)
    for figures, expected in zip(found.values(), line, strict=True):
        figures["of line"] = figures["seconds"] / expected
    click.echo(f"\nCost by rows, {sum(NARROW)} columns\n{'rows':<20}{'seconds':>9}{'GiB':>8}{'of line':>9}")
    for name, figures in found.items():
        click.echo(f"{name:<20}{figures['seconds']:9.1f}{figures['bytes'] / 2**30:8.2f}{figures['of line']:9.2f}")
    return found


PARTS = {"parquet": parquet_part, "csv": csv_part, "linear": linear_part}


@click.command()
@click.option("--quick", is_flag=True, help="A tenth of the rows.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="Only this part.")
@click.option("--runs", default=3, show_default=True, help="Turns that count.")
@click.option("--contender", hidden=True)
@click.option("--data", type=click.Path(path_type=Path), hidden=True)
@click.option("--out", type=click.Path(path_type=Path), hidden=True)
def main(
    quick: bool,
    json_file: Path | None,
    parts: tuple[str, ...],
    runs: int,
    contender: str | None,
    data: Path,
    out: Path,
) -> None:
    """Measure, and print a table for each part."""
    if contender is not None:
        CONTENDERS[contender](data, out)
        return
    results = {}
    for part in parts or tuple(PARTS):
        scratch = Path(tempfile.mkdtemp(prefix="preprocess-"))
        try:
            results[part] = PARTS[part](scratch, quick, runs)
        finally:
            shutil.rmtree(scratch)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
