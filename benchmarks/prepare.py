"""Preparation of a table, compared with Polars (streaming).

    python benchmarks/prepare.py [OPTIONS]

``parquet``: 2 M rows of 150 float64, 30 int64 (one of them the id) and 20 texts become standardised float32 and codes,
with statistics of the training rows, split by the id. No contender computes medians. Ours also shuffles, hashes and
checks. "Polars, the same work" puts the rows in random order and takes the SHA-256 of its output; "Polars, bare" does
neither. ``csv``: 500 k rows of 200 columns, one in a thousand with a value that is not a number, become typed columns;
ours quarantines the bad rows by line, Polars' bare sink reads them as null. ``linear``: the cost of 1 to 8 M rows of 50
columns, compared with a straight line.

Contenders take turns, each in a fresh process; the first turn is discarded. Reported are medians, and ratios between
contenders of the same turn with a 95 % interval of their median. Before every turn, as much memory as the largest
contender needs is written and freed, see :func:`touch_free_memory`. Memory is the peak of the proportional set size of
the process and its children (shared pages count once), in a separate run.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from harness.command import benchmark, part_option
from harness.preparing import BARE, CONTENDERS, SAME_WORK, SINK
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, interval_of_median, settled
from slipstream.shared.distributed.child_processes import no_main_module

#: Numbers of columns: floats, integers (with the id) and texts (with the target).
WIDE, NARROW = (150, 30, 20), (38, 7, 5)
GROUP_ROWS = 100_000
BAD_SHARE = 1e-3


# The data


def columns(rows: int, first: int, widths: tuple[int, int, int]) -> dict[str, Any]:
    """Return rows from number ``first``: floats (some with gaps), integers, and texts with growing vocabularies."""
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
    """Write a CSV with a text in place of a number in one row of a thousand."""
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
    """Return the bytes of a process and its children, with shared pages counted once (PSS)."""
    total = 0
    try:
        for each in processes_below(pid):
            text = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="utf-8")
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) << 10
    except (OSError, StopIteration):
        pass  # a process has just ended
    return total


@contextmanager
def at_work(contender: str, data: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    with tempfile.TemporaryDirectory(dir=data.parent) as out:
        process = multiprocessing.get_context("spawn").Process(target=CONTENDERS[contender], args=(data, Path(out)))
        with no_main_module():
            process.start()
        yield process
        process.join()
    if process.exitcode:
        raise SystemExit(f"{contender} failed with exit code {process.exitcode}")


def weigh(contender: str, data: Path) -> Figures:
    """Return peak bytes and times of one contender.

    This is a separate run, because polling every 50 ms takes 15 % of two cores.
    """
    peak = 0
    with timed() as figures, at_work(contender, data) as process:
        assert process.pid is not None
        while process.is_alive():
            peak = max(peak, proportional_bytes(process.pid))
            process.join(0.05)
    click.echo(f"  {contender:<22} {peak / 2**30:5.2f} GiB", err=True)
    return {**figures, "bytes": peak}


@contextmanager
def timed() -> Iterator[Figures]:
    """Measure the wall seconds of the block, and CPU seconds of child processes that end in it.

    The yielded figures are set at the end of the block.
    """
    figures: Figures = {}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    yield figures
    figures["seconds"] = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def touch_free_memory(most: float) -> None:
    """Write to at most ``most`` bytes of free memory, and free them.

    A virtual machine may return free memory to its host (free page reporting). The next write to that memory then takes
    ten times as long, so a contender's cost would depend on its predecessor.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.ones(int(min(most, 0.75 * free)), np.uint8)


def measure(contender: str, data: Path, memory: float) -> Figures:
    """Return seconds and CPU seconds of one contender in a fresh process, start-up included.

    Calls :func:`touch_free_memory` for ``memory`` bytes first.
    """
    touch_free_memory(memory)
    with timed() as figures, at_work(contender, data):
        pass
    click.echo(f"  {contender:<22} {figures['seconds']:7.1f} s  {figures['cpu_seconds']:7.1f} cpu s", err=True)
    return figures


def compare(contenders: list[str], data: Path, turns: int, peers: Mapping[str, str]) -> dict[str, Figures]:
    """Return medians of every installed contender, and ratios of its times and memory to those of ``peers``.

    Ratios of times are within a turn, with a 95 % interval. ``peers`` maps contenders to words for keys, such as
    ``seconds_over_<word>``.
    """
    installed = [name for name in contenders if not name.startswith("Polars") or importlib.util.find_spec("polars")]
    if left_out := [name for name in contenders if name not in installed]:
        click.echo(f"  {', '.join(left_out)}: skipped, as polars is not installed", err=True)
    weighed = {name: weigh(name, data) for name in installed}
    memory = max(each["bytes"] for each in weighed.values()) + data.stat().st_size  # written files take memory, too
    found = {name: [each] for name, each in weighed.items()}  # enough for a quick run
    if turns > 1:
        found = in_turns({name: functools.partial(measure, name, data, memory) for name in installed}, turns)
    figures = {name: {**settled(taken), "bytes": weighed[name]["bytes"]} for name, taken in found.items()}
    for peer, word in peers.items():
        for name in installed if peer in installed else ():
            for key in ("seconds", "cpu_seconds"):
                ratios = [ours[key] / its[key] for ours, its in zip(found[name], found[peer], strict=True)]
                ratio, low, high = interval_of_median(ratios[1:] or ratios)
                over = f"{key}_over_{word}"
                figures[name] |= {over: ratio, f"{over}_low": low, f"{over}_high": high}
            figures[name][f"bytes_over_{word}"] = weighed[name]["bytes"] / weighed[peer]["bytes"]
    return figures


COLUMNS = (
    Column("seconds", "seconds"),
    Column("cpu s", "cpu_seconds"),
    Column("GiB", "bytes", "{:.2f}", 1 << 30),
)


def beside(words: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of a comparison with peers, given the ``words`` in :func:`compare`."""
    columns: list[Column] = []
    for word in words:
        columns += [
            Column(f"x {word}", f"seconds_over_{word}", "{:.2f}"),
            Column("from", f"seconds_over_{word}_low", "{:.2f}"),
            Column("to", f"seconds_over_{word}_high", "{:.2f}"),
            Column("cpu", f"cpu_seconds_over_{word}", "{:.2f}"),
            Column("memory", f"bytes_over_{word}", "{:.2f}"),
        ]
    return (*COLUMNS, *columns)


def parquet_part(data: Path, quick: bool, turns: int) -> Table:
    rows, widths = (2_000, NARROW) if quick else (2_000_000, WIDE)
    make_parquet(data / "t.parquet", rows, widths)
    contenders = ["ours", SAME_WORK, BARE, *([] if quick else ["ours, in order"])]
    peers = {SAME_WORK: "same", BARE: "bare"}
    found = compare(contenders, data / "t.parquet", turns, peers)
    return Table(f"Parquet, {rows:,} x {sum(widths)}", beside(peers.values()), found, (BARS,))


BARS = "bars for ours: time at most 1.00 x same and 1.25 x bare, memory at most 0.50 x either"


def csv_part(data: Path, quick: bool, turns: int) -> Table:
    rows, widths = (2_000, NARROW) if quick else (500_000, WIDE)
    make_csv(data / "t.csv", rows, widths)
    peers = {SINK: "sink"}
    found = compare(["ours, ingest", SINK, *([] if quick else ["ours"])], data / "t.csv", turns, peers)
    return Table(f"CSV, {rows:,} x {sum(widths)}", beside(peers.values()), found)


def linear_part(data: Path, quick: bool, turns: int) -> Table:
    counts = [2_000, 4_000] if quick else [1_000_000, 2_000_000, 4_000_000, 8_000_000]
    found = {}
    for rows in counts:
        make_parquet(data / "t.parquet", rows, NARROW)
        found[f"{rows:,} rows"] = compare(["ours"], data / "t.parquet", turns, {})["ours"]
    seconds = [figures["seconds"] for figures in found.values()]
    line = np.polyval(np.polyfit(counts, seconds, 1), counts)
    for figures, expected in zip(found.values(), line, strict=True):
        figures["of_line"] = figures["seconds"] / float(expected)
    columns = (*COLUMNS, Column("of a straight line", "of_line", "{:.2f}"))
    return Table(f"Cost by rows, {sum(NARROW)} columns", columns, found)


PARTS = {"parquet": parquet_part, "csv": csv_part, "linear": linear_part}


@benchmark
@part_option(PARTS)
@click.option("--runs", default=3, show_default=True, help="Measured turns.")
def main(quick: bool, parts: tuple[str, ...], runs: int) -> Iterator[Table]:
    """Measure the cost of preparing a table."""
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="prepare-") as data:
            yield PARTS[part](Path(data), quick, 1 if quick else runs + 1)


if __name__ == "__main__":
    main()
