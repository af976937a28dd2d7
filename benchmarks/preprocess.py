"""Preparing a table beside Polars (streaming) and pandas written by hand for the same.

    python benchmarks/preprocess.py [--quick] [--json FILE] [--part parquet|csv|linear] [--runs N]

``parquet``: 2 M rows of 150 float64, 30 int64 (one of them the id) and 20 texts become standardised float32 and codes,
with statistics of the training rows, split by the id. Nobody computes medians. Ours also shuffles, hashes and checks;
"Polars, the same work" puts the rows in random order and takes the SHA-256 of what it wrote, "Polars, bare" and pandas
do neither. ``csv``: 500 k rows of 200 columns, one in a thousand with a value that is no number, become typed columns;
ours sets the bad rows aside by line, Polars' bare sink drops nothing and reads them as null. ``linear``: rows of 50
columns, doubled again and again, against a straight line. Contenders take turns, each in a fresh process; the first
turn is discarded; reported are medians. Memory is the peak of the proportional set size of the process and its
children, so that shared pages count once, in a run before the turns.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from harness.command import benchmark, part_option
from harness.table import Column, Table
from harness.turns import Figures, in_turns, settled
from tasks.hardware.cpus import usable_cores
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.preprocess.pool.resume import resumable_scratch
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


def make_parquet(path: Path, rows: int, widths: tuple[int, int, int]) -> None:
    writer = None
    for first in range(0, rows, GROUP_ROWS):
        table = pa.table(columns(min(GROUP_ROWS, rows - first), first, widths))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def make_csv(path: Path, rows: int, widths: tuple[int, int, int]) -> None:
    """As CSV, with a text in place of a number in one row of a thousand."""
    draw = np.random.default_rng(1)
    writer = None
    for first in range(0, rows, GROUP_ROWS):
        table = pa.table(columns(min(GROUP_ROWS, rows - first), first, widths))
        for place in range(widths[0]):
            bad = draw.random(table.num_rows) < BAD_SHARE / widths[0]
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
    with closing(Workers(usable_cores())) as workers, resumable_scratch(out, workers) as place:
        source = open_source(list_source(str(data)), DataConfig(id="id"), place)
    assert source.read == source.rows + len(source.bad)


def polars(data: Path, out: Path, the_same_work: bool = False) -> None:
    """Two streaming passes: statistics of the training rows, then one uncompressed file per split.

    ``the_same_work`` as ours: rows in random order, and the SHA-256 of what was written.
    """
    import polars as pl

    lazy = pl.scan_parquet(data) if data.suffix == ".parquet" else pl.scan_csv(data, ignore_errors=True)
    share = (pl.col("id").hash(seed=0) % 10_000) / 10_000
    split = pl.when(share < 0.15).then(2).when(share < 0.3).then(1).otherwise(0)
    schema = lazy.collect_schema()
    numbers = [n for n, kind in schema.items() if kind.is_numeric() and n != "id"]
    texts = [n for n, kind in schema.items() if kind == pl.String]
    figures = [getattr(pl.col(numbers), figure)().name.suffix(f" {figure}") for figure in POLARS_FIGURES]
    counted = [pl.col(n).value_counts(sort=True).implode().alias(n) for n in texts]
    found = lazy.filter(split == 0).select(*figures, *counted).collect(engine="streaming").row(0, named=True)
    encoded = [((pl.col(n) - found[f"{n} mean"]) / found[f"{n} std"]).fill_null(0).cast(pl.Float32) for n in numbers]
    for n in texts:
        words = [entry[n] for entry in found[n] if entry[n] is not None]
        codes = pl.col(n).replace_strict(words, range(2, len(words) + 2), default=1, return_dtype=pl.Int32)
        encoded.append(codes.fill_null(0))
    order = pl.col("id").hash(seed=1).alias("order")
    files = [out / f"{part}.arrow" for part in range(3)]
    sinks = []
    for part, file in enumerate(files):
        rows = lazy.filter(split == part)
        rows = rows.select(order, *encoded).sort("order").drop("order") if the_same_work else rows.select(encoded)
        sinks.append(rows.sink_ipc(file, compression="uncompressed", lazy=True))
    pl.collect_all(sinks, engine="streaming")
    if the_same_work:
        with ThreadPoolExecutor() as threads:
            (out / "SHA256SUMS").write_text("".join(threads.map(sum_line, files)))


POLARS_FIGURES = ("mean", "std", "min", "max", "null_count")


def sum_line(path: Path) -> str:
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def polars_the_same_work(data: Path, out: Path) -> None:
    polars(data, out, the_same_work=True)


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
            figures = train[name].agg(["mean", "std", "min", "max", "count"])
            encoded[:, place] = ((frame[name] - figures["mean"]) / figures["std"]).fillna(0)
        else:
            words = train[name].value_counts().index
            encoded[:, place] = frame[name].map(dict(zip(words, range(2, len(words) + 2), strict=True))).fillna(1)
    for part in range(3):
        encoded[split == part].tofile(out / f"{part}.rows")


SAME_WORK, BARE, SINK = "Polars, the same work", "Polars, bare", "Polars, bare sink"
CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "ours": ours,
    "ours, in order": ours_in_order,
    "ours, ingest": ours_ingest,
    SAME_WORK: polars_the_same_work,
    BARE: polars,
    SINK: polars_sink,
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


@contextmanager
def at_work(contender: str, data: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A contender in a fresh process, whose end is waited for."""
    with tempfile.TemporaryDirectory(dir=data.parent) as out:
        process = multiprocessing.get_context("spawn").Process(target=CONTENDERS[contender], args=(data, Path(out)))
        process.start()
        yield process
        process.join()
    if process.exitcode:
        raise SystemExit(f"{contender} failed with {process.exitcode}")


def weigh(contender: str, data: Path) -> float:
    """Peak bytes of one contender. In a run of its own: who looks every 50 ms takes 15 % of two cores."""
    peak = 0
    with at_work(contender, data) as process:
        assert process.pid is not None
        while process.is_alive():
            peak = max(peak, proportional_bytes(process.pid))
            process.join(0.05)
    click.echo(f"  {contender:<22} {peak / 2**30:5.2f} GiB", err=True)
    return peak


def measure(contender: str, data: Path) -> Figures:
    """Seconds and processor seconds of one contender in a fresh process, start-up included."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with at_work(contender, data) as process:
        process.join()
        seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    click.echo(f"  {contender:<22} {seconds:7.1f} s  {busy:7.1f} cpu s", err=True)
    return {"seconds": seconds, "cpu_seconds": busy}


def compare(contenders: list[str], data: Path, turns: int) -> dict[str, Figures]:
    """The medians of each that is installed."""
    installed = [name for name in contenders if not name.startswith("Polars") or importlib.util.find_spec("polars")]
    if left_out := [name for name in contenders if name not in installed]:
        click.echo(f"  {', '.join(left_out)}: polars is not installed, left out", err=True)
    weights = {name: weigh(name, data) for name in installed}
    found = in_turns({name: functools.partial(measure, name, data) for name in installed}, turns)
    return {name: {**settled(figures), "bytes": weights[name]} for name, figures in found.items()}


COLUMNS = (
    Column("seconds", "seconds"),
    Column("cpu s", "cpu_seconds"),
    Column("GiB", "bytes", "{:.2f}", 1 << 30),
)


def beside(peers: Mapping[str, str], found: dict[str, Figures]) -> tuple[Column, ...]:
    """Adds to each row its time, its processor time and its memory over those of the peers, and gives the columns.

    ``peers`` are contenders, with the word for each in a title.
    """
    columns: list[Column] = []
    for peer, word in peers.items():
        for figures in found.values() if peer in found else ():
            for key in ("seconds", "cpu_seconds", "bytes"):
                figures[f"{key}_over_{word}"] = figures[key] / found[peer][key]
        columns += [
            Column(f"x {word}", f"seconds_over_{word}", "{:.2f}"),
            Column("cpu", f"cpu_seconds_over_{word}", "{:.2f}"),
            Column("memory", f"bytes_over_{word}", "{:.2f}"),
        ]
    return (*COLUMNS, *columns)


def parquet_part(data: Path, quick: bool, turns: int) -> Table:
    rows, widths = (2_000, NARROW) if quick else (2_000_000, WIDE)
    make_parquet(data / "t.parquet", rows, widths)
    contenders = ["ours", SAME_WORK, BARE, *([] if quick else ["ours, in order", "pandas"])]
    found = compare(contenders, data / "t.parquet", turns)
    columns = beside({SAME_WORK: "same", BARE: "bare"}, found)
    return Table(f"Parquet, {rows:,} x {sum(widths)}", columns, found, (BARS,))


BARS = "bars for ours: time at most 1.00 x same and 1.25 x bare, memory at most 0.50 x either"


def csv_part(data: Path, quick: bool, turns: int) -> Table:
    rows, widths = (2_000, NARROW) if quick else (500_000, WIDE)
    make_csv(data / "t.csv", rows, widths)
    found = compare(["ours, ingest", SINK, *([] if quick else ["ours", "pandas"])], data / "t.csv", turns)
    return Table(f"CSV, {rows:,} x {sum(widths)}", beside({SINK: "sink"}, found), found)


def linear_part(data: Path, quick: bool, turns: int) -> Table:
    counts = [2_000, 4_000] if quick else [1_000_000, 2_000_000, 4_000_000, 8_000_000]
    found = {}
    for rows in counts:
        make_parquet(data / "t.parquet", rows, NARROW)
        found[f"{rows:,} rows"] = compare(["ours"], data / "t.parquet", turns)["ours"]
    seconds = [figures["seconds"] for figures in found.values()]
    line = np.polyval(np.polyfit(counts, seconds, 1), counts)
    for figures, expected in zip(found.values(), line, strict=True):
        figures["of_line"] = figures["seconds"] / float(expected)
    columns = (*COLUMNS, Column("of a straight line", "of_line", "{:.2f}"))
    return Table(f"Cost by rows, {sum(NARROW)} columns", columns, found)


PARTS = {"parquet": parquet_part, "csv": csv_part, "linear": linear_part}


@benchmark
@part_option(PARTS)
@click.option("--runs", default=3, show_default=True, help="Turns that count.")
def main(quick: bool, parts: tuple[str, ...], runs: int) -> Iterator[Table]:
    """What preparing a table costs."""
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="preprocess-") as data:
            yield PARTS[part](Path(data), quick, 1 if quick else runs + 1)


if __name__ == "__main__":
    main()
