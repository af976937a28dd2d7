"""Benchmark artifact: a network profile as a table with the columns of nccl-tests, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from slipstream.pipeline.collectives.findings import grade_bandwidth
from slipstream.pipeline.collectives.operations.cases import ROOT
from slipstream.pipeline.collectives.operations.reference_data import DTYPES
from slipstream.pipeline.collectives.tune.decision import compare_settings
from slipstream.shared.artifacts.records import to_json
from slipstream.shared.formatting import count_with_noun
from slipstream.shared.interconnect.history import trend_points
from slipstream.shared.interconnect.model.predictions import model_curve, model_lines
from slipstream.shared.interconnect.profile import (
    COURSE,
    MODEL,
    TABLE,
    Measurement,
    ModelPoint,
    NetworkProfile,
    TrendPoint,
    write_profile,
)
from slipstream.shared.interconnect.profile import CSV as CSV_FILE

ROOTED = ("broadcast", "reduce", "gather", "scatter")
PERCENTILES = (10, 50, 90, 99)
#: Names and widths; the first nine columns are those of nccl-tests, and "time" is the median.
COLUMNS = (
    *(("size", 12), ("count", 12), ("type", 9), ("redop", 6), ("root", 5)),
    *(("time", 10), ("algbw", 8), ("busbw", 8), ("#wrong", 7)),
    *(("mode", 8), ("place", 6), ("fly", 4), ("p10", 10), ("p90", 10), ("p99", 10), ("95 %", 9), ("runs", 7)),
)
UNITS = (
    "(B)",
    "(elements)",
    "",
    "",
    "",
    "(us)",
    "(GB/s)",
    "(GB/s)",
    "",
    "",
    "",
    "",
    "(us)",
    "(us)",
    "(us)",
    "(+-%)",
    "",
)
#: ``low_us`` and ``high_us`` bound the confidence interval of the median over launches.
CSV = (
    *("operation", "dtype", "reduction", "bytes", "world", "ranks", "mode", "in_place", "in_flight", "launches"),
    *("iterations", "narrow", "p10_us", "p50_us", "p90_us", "p99_us", "low_us", "high_us", "algbw_gbps", "busbw_gbps"),
)


def write_results(
    directory: Path,
    profile: NetworkProfile,
    course: Sequence[TrendPoint],
    made_by: Mapping[str, object],
    above: str = "",
) -> None:
    """Write the artifact into the fresh ``directory``.

    It contains the profile, its table below the text ``above``, its CSV, and data for charts. ``course`` has the
    largest all_reduce of every earlier profile.
    """
    forms = {
        TABLE: (above + results_table(profile)).encode(),
        CSV_FILE: csv_text(profile).encode(),
        COURSE: to_json([*course, *trend_points(profile)], list[TrendPoint]),
        MODEL: to_json(model_curve(profile), list[ModelPoint]),
    }
    write_profile(directory, profile, made_by, forms)


def results_table(profile: NetworkProfile) -> str:
    """Return one line per case, under a heading per operation.

    "-" replaces percentiles with too few iterations beyond them, and intervals of too few launches. ``*`` after the
    number of iterations marks cases that ran out of time.
    """
    lines = [f"# {line}" for line in operation_heading(profile)]
    for (operation, world), found in groupby(profile.measurements, key=lambda m: (m.operation, m.world)):
        some = (
            "" if world == profile.fingerprint.world else f" between {world} of {profile.fingerprint.world} processes"
        )
        lines += [
            "#",
            f"# {operation}{some}",
            "#" + format_row([name for name, _ in COLUMNS])[1:],
            "#" + format_row(list(UNITS))[1:],
        ]
        lines += [format_row(measurement_cells(m)) for m in found]
    lines += ["#", *(f"# {line}" for line in remarks(profile))]
    return "\n".join(line.rstrip() for line in lines)


def operation_heading(profile: NetworkProfile) -> Iterator[str]:
    its = profile.fingerprint
    nodes = f" on {its.nodes} nodes" if its.nodes > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in its.libraries.items())
    launches = count_with_noun(profile.launches, "launch")
    yield f"{count_with_noun(its.world, 'process')}{nodes}, {its.backend}, {versions}, {launches}"
    if profile.short:
        yield "short benchmark: the collectives of training at few sizes; slipstream collectives measures all"
    for host in profile.topology.hosts:
        ranks = f"rank {host.ranks[0]}" if len(host.ranks) == 1 else f"ranks {', '.join(map(str, host.ranks))}"
        yield f"{ranks}: {host.devices[0]}, {host.cores} cores, {host.numa_nodes} NUMA node(s)"
        for line in (*host.links, *host.interfaces, *host.rdma):
            yield f"  {line}"
    for line in profile.topology.transports:
        yield f"used: {line}"


def remarks(profile: NetworkProfile) -> Iterator[str]:
    """Yield the lines below the table: overlap, pairs, model, grade, findings, skipped cases."""
    for overlap in profile.overlaps:
        yield str(overlap)
    if profile.pairs:
        slowest, fastest = max(profile.pairs, key=lambda p: p.p50), min(profile.pairs, key=lambda p: p.p50)
        for word, pair in (("fastest", fastest), ("slowest", slowest)):
            yield f"{word} pair: ranks {pair.ranks[0]} and {pair.ranks[1]}, {pair.busbw():.3f} GB/s each way"
    if profile.numa:
        free, bound = map(list, zip(*profile.numa, strict=True))
        yield f"with each rank bound to a NUMA node, the largest all_reduce: {compare_settings(free, bound, tried=1)}"
    yield from model_lines(profile)
    yield from grade_bandwidth(profile)
    yield from (f"FINDING: {line}" for line in profile.topology.findings)
    yield from (f"comparison: {line}" for line in profile.beside)
    yield from (f"skipped: {line}" for line in profile.left_out)
    ended = sum(not launch.narrow for m in profile.measurements for launch in m.launches)
    of = sum(len(m.launches) for m in profile.measurements)
    yield (
        f"{of - ended} of {of} runs ended because their median was known to 2 %, {ended} (*) because the time was over"
    )


def format_row(words: list[str]) -> str:
    return "".join(f"{word:>{width + 1}}" for word, (_, width) in zip(words, COLUMNS, strict=True))


def measurement_cells(m: Measurement) -> list[str]:
    count = m.bytes // DTYPES[m.dtype].itemsize if m.dtype else 0
    root = str(ROOT) if m.operation in ROOTED else "-1"
    p10, p90, p99 = (microseconds(m.percentile(percent)) for percent in (10, 90, 99))
    ended = "" if all(launch.narrow for launch in m.launches) else "*"
    return [
        *(str(m.bytes), str(count), m.dtype or "none", m.reduction or "none", root),
        *(microseconds(m.p50), f"{m.algbw():.3f}", f"{m.busbw():.3f}", "0"),
        *(
            m.mode,
            "in" if m.in_place else "out",
            str(m.in_flight),
            p10,
            p90,
            p99,
            half_width_percent(m),
            f"{m.iterations}{ended}",
        ),
    ]


def half_width_percent(m: Measurement) -> str:
    """Return the half width of the median's interval, in percent; "-" if unknown."""
    interval = m.interval()
    if interval is None:
        return "-"
    half = 50 * (interval[1] - interval[0]) / m.p50
    return f"{half:.1f}" if half < 100 else ">100"


def microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def csv_text(profile: NetworkProfile) -> str:
    """Return one line per case and pair; percentiles and intervals from too few measurements are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV)
    for m in (*profile.measurements, *profile.pairs):
        times = [m.percentile(percent) for percent in PERCENTILES] + list(m.interval() or (None, None))
        narrow = all(launch.narrow for launch in m.launches)
        writer.writerow(
            (
                *(m.operation, m.dtype, m.reduction, m.bytes, m.world, " ".join(map(str, m.ranks)), m.mode),
                *(int(m.in_place), m.in_flight, len(m.launches), m.iterations, int(narrow)),
                *("" if seconds is None else f"{seconds * 1e6:.3f}" for seconds in times),
                *(f"{m.algbw():.6f}", f"{m.busbw():.6f}"),
            )
        )
    return text.getvalue()
