"""Figures as short texts, and tables of them on a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from slipstream.shared.one_line import one_line

UNKNOWN = "—"
LABEL_LETTERS = 14
#: Limit in percent or points from which on there is no limit.
NO_LIMIT = 1000.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def count(number: int) -> str:
    return f"{number:,}"


def count_with_noun(number: int, noun: str) -> str:
    """Return a number with its noun: 1 thread, 2,000 threads, 2 processes."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{count(number)} {noun if number == 1 else plural}"


def rows(number: int) -> str:
    return count_with_noun(number, "row")


def percent(share: float | None, digits: int = 2) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def probability(value: float) -> str:
    """Return a probability with six digits; near 1, its distance from 1: 0.15, 1 - 2.3e-09."""
    return f"{value:.6g}" if value < 0.999 else f"1 - {1 - value:.3g}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with significant digits, without an exponent if readable: 0.0123, 1.23, 123, 12,345, 1.2e-07."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def value(number: float) -> str:
    """Return a data value: integers below ten million in full, others to four digits."""
    if not abs(number) < 1e7:
        return f"{number:.4g}"
    return count(int(number)) if number == int(number) else significant(number, 4)


def moment(seconds: float) -> str:
    """Return seconds since 1970 (UTC) as a date, with the time unless it is midnight: 2026-01-02 03:04."""
    try:
        time = EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return value(seconds)
    return f"{time:%Y-%m-%d}" if (time.hour, time.minute) == (0, 0) else f"{time:%Y-%m-%d %H:%M}"


def age(seconds: float) -> str:
    """Return rounded seconds in the largest unit that fits twice: 100 s, 3 min, 30 d."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def column_figure(column: Mapping[str, Any], name: str) -> str:
    """Return a figure of a data card's column in its unit, or "" if the card lacks it."""
    if name not in column:
        return ""
    if column["type"] == "time" or column["type"].endswith(" date"):
        return f"{significant(column[name] / 86_400)} days" if name == "std" else moment(column[name])
    return value(column[name])


def file_size(number: int | None) -> str:
    """Return the bytes of a file in decimal units: 84.3 KB."""
    return UNKNOWN if number is None else scaled(number, 1000, ("B", "KB", "MB", "GB", "TB"))


def size_text(number: float) -> str:
    """Return bytes of memory or of a message in binary units: 16 MiB."""
    return scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(number: float) -> str:
    return scaled(number, 1000, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def scaled(number: float, step: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(number) >= step and power < len(names) - 1:
        number /= step
        power += 1
    return f"{number:.0f} {names[power]}" if number == int(number) else f"{significant(number)} {names[power]}"


def duration(seconds: float | None) -> str:
    """Return a time in one unit: 61.2 µs, 5.50 ms, 3.36 h."""
    if seconds is None or math.isinf(seconds):
        return UNKNOWN if seconds is None else "never"
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, length = next((fitting for fitting in units if seconds >= fitting[1]), units[-1])
    return f"{significant(seconds / length)} {unit}"


def milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None else duration(value / 1e3)


def microseconds(value: float | None) -> str:
    return UNKNOWN if value is None else duration(value / 1e6)


def seconds(value: float) -> str:
    """Return a wall-clock time: 0.4 s, 12.3 s, 2 min 5 s, 1 h 4 min."""
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def dollars(value: float | None) -> str:
    """Return dollars with cents, or with three digits below ten cents."""
    if value is None:
        return UNKNOWN
    return f"${value:.3g}" if 0 < value < 0.1 else f"${value:,.2f}"


def energy(watt_hours: float | None) -> str:
    if watt_hours is None:
        return UNKNOWN
    return f"{significant(watt_hours)} Wh" if watt_hours < 1000 else f"{significant(watt_hours / 1000)} kWh"


def bandwidth(value: float | None) -> str:
    """Return a bandwidth in 1e9 bytes per second: 12.3 GB/s."""
    return UNKNOWN if value is None else f"{significant(value)} GB/s"


def metric(name: str, value: float | None) -> str:
    """Return a metric's value: shares in percent, others in their unit."""
    if value is None:
        return UNKNOWN
    return percent(value) if name in SHARES else significant(value, 4)


def limit(value: float, digits: int = 2) -> str:
    """Return a limit in percent or points: 0.71; "no limit" from :data:`NO_LIMIT` on."""
    return "no limit" if abs(value) >= NO_LIMIT else f"{value:.{digits}f}"


def limits(low: float, high: float, digits: int = 2) -> str:
    """Return an interval: -0.30 to 0.71."""
    return f"{limit(low, digits)} to {limit(high, digits)}"


def with_limits(value: float, low: float, high: float) -> str:
    """Return a figure with its limits: 0.12 (-0.30 to 0.71)."""
    return f"{value:.2f} ({limits(low, high)})"


def units(layers: Sequence[int]) -> str:
    """Return the units of every layer, with equal neighbours merged: 512, 256, 4 x 64."""
    runs = [(width, len(list(same))) for width, same in groupby(layers)]
    return ", ".join(str(width) if times == 1 else f"{times} x {width}" for width, times in runs)


def shorten_label(label: str) -> str:
    """Return a name from the data on one line, in at most ``LABEL_LETTERS`` characters."""
    line = " ".join(label.split())
    return line if len(line) <= LABEL_LETTERS else f"{line[: LABEL_LETTERS - 1]}…"


def capitalise_sentence(text: str) -> str:
    """Capitalise ``text`` unless it starts with a variant's name, which keeps its spelling."""
    word = text.split(" ", 1)[0]
    return text if "-" in word else text[:1].upper() + text[1:]


def setting(value: object) -> str:
    """Return a configuration value on one line, as in YAML where possible."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(item) for item in value) if value else "none"
    if isinstance(value, str):
        return value if value.strip() else f'"{value}"'
    return "none" if value in ({}, None) else f"{value}"


#: Metrics that are shares of 1, and the names of all metrics.
SHARES = ("accuracy", "macro_f1", "ece")
NAMES = {
    "accuracy": "accuracy",
    "log_loss": "log loss",
    "roc_auc": "ROC AUC",
    "average_precision": "average precision",
    "macro_f1": "macro F1",
    "ece": "calibration error",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "bits_per_byte": "bits per byte",
    "perplexity": "perplexity",
}
#: Metrics for which less is better.
LESS_IS_BETTER = ("log_loss", "ece", "rmse", "mae", "bits_per_byte", "perplexity")
#: Unit and decimals of a metric's difference from the baseline; percent if absent.
UNITS = {**dict.fromkeys(SHARES, ("points", 2)), "bits_per_byte": ("bits per byte", 3)}


# Tables


def aligned_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], width: int | None = None
) -> str:
    """Return the lines of a table; columns named in ``left`` are left-aligned, all others right-aligned.

    Columns beyond ``width`` continue below, with the first column repeated. Cells may hold names from untrusted files,
    so line breaks and control characters in them are escaped.
    """
    lines = [list(columns), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{line[place]:{'<' if columns[place] in left else '>'}{widths[place]}}" for place in part).rstrip()
        for part in column_groups(widths, width)
        for line in lines
    )


def column_groups(widths: Sequence[int], width: int | None) -> Iterator[list[int]]:
    """Yield the column indices of every part of a table split at ``width``.

    All parts have the first column; wider columns than ``width`` are not split.
    """
    part, taken = [0], widths[0]
    for place, its in enumerate(widths[1:], 1):
        if width is not None and taken + 2 + its > width and len(part) > 1:
            yield part
            part, taken = [0], widths[0]
        part.append(place)
        taken += 2 + its
    yield part


def numbered_line(number: int, cells: Iterable[str]) -> str:
    """Return a line of a numbered list, with cells as in :func:`aligned_table`."""
    return "  ".join([f"{number:>4}", *map(one_line, cells)])
