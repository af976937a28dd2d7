"""Dates and times in text: ISO 8601, BigQuery's form, and dates whose day or month comes first.

Texts are parsed without a clock: "now" is not a time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MICROSECONDS = pa.timestamp("us", tz="UTC")
NAIVE = pa.timestamp("us")
#: Time of the day, with an optional fraction of a second and zone. Digits beyond microseconds are truncated.
CLOCK = (
    r"(?P<hour>[01]\d|2[0-3])"
    r"(?::?(?P<minute>[0-5]\d)(?::?(?P<second>[0-5]\d)(?:[.,](?P<fraction>\d{1,6})\d*)?)?)?"
    r" ?(?P<zone>Z|UTC|[+-]\d\d(?::?\d\d)?)?"
)
#: Date as year, month and day, or only its first parts, with an optional time of the day.
ISO = (
    r"^(?P<year>\d{4})(?:-(?P<month>0?[1-9]|1[0-2])"
    rf"(?:-(?P<day>0?[1-9]|[12]\d|3[01])(?:[T ]{CLOCK}| UTC)?)?)?$"
)
#: Rewritings of dates with slashes, points or no marks, and of hours with one digit.
USUAL_FORM = (
    (r"^(\d{4})(\d\d)(\d\d(?:[T ].*)?)$", r"\1-\2-\3"),
    (r"^(\d{4})/(\d\d?)/(\d)", r"\1-\2-\3"),
    (r"^(\d{4})\.(\d\d?)\.(\d)", r"\1-\2-\3"),
    (r"([T ])(\d):", r"\10\2:"),
)
#: Date whose parts are separated by dashes, slashes or dots, with the year last, and the time that may follow.
YEAR_LAST = (
    r"^(?P<first>\d{1,2})[-/.](?P<second>\d{1,2})[-/.](?P<year>\d{4})"
    r"(?: (?P<hour>\d{1,2}):(?P<minute>\d\d)(?P<seconds>:\d\d(?:[.,]\d+)?)?)?$"
)
#: Start of every text that may be a time.
TIMELIKE = r"^\d{4}|^\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"


def parse_iso(texts: pa.Array) -> pa.Array:
    """Return texts as times in microseconds (UTC unless they name a zone), null where they are not ISO 8601.

    Years have four digits. BigQuery's suffix `` UTC`` is a zone.
    """
    zoned = pc.all(pc.ends_with(texts, " UTC")).as_py()
    for kind in (NAIVE, MICROSECONDS):
        try:
            return (pc.utf8_slice_codeunits(texts, 0, -len(" UTC")) if zoned else texts).cast(kind).cast(MICROSECONDS)
        except pa.ArrowInvalid:
            continue
    for pattern, usual in USUAL_FORM:
        texts = pc.replace_substring_regex(texts, pattern, usual)
    parts = pc.extract_regex(texts, ISO)
    month, day = (pc.if_else(pc.equal(parts.field(name), ""), "1", parts.field(name)) for name in ("month", "day"))
    date = pc.binary_join_element_wise(parts.field("year"), *(pc.utf8_lpad(part, 2, "0") for part in (month, day)), "-")
    clock = pc.binary_join_element_wise(
        *(pc.utf8_lpad(parts.field(name), 2, "0") for name in ("hour", "minute", "second")), ":"
    )
    fraction = pc.utf8_rpad(parts.field("fraction"), 6, "0")
    whole = pc.binary_join_element_wise(date, pc.binary_join_element_wise(clock, fraction, "."), " ")
    moments = cast_valid(pc.if_else(parts.is_valid(), whole, None))
    zones = parts.field("zone").dictionary_encode()
    ahead = pa.array([zone_seconds(zone) for zone in zones.dictionary.to_pylist()], pa.int64()).take(zones.indices)
    return pc.subtract(moments.cast(pa.int64()), pc.multiply(ahead, 1_000_000)).cast(MICROSECONDS)


def cast_valid(texts: pa.Array) -> pa.Array:
    """Return the texts as naive times, null for a day that its month lacks; such texts are found by bisection."""
    try:
        return texts.cast(NAIVE)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, NAIVE)
    half = len(texts) // 2
    return pa.concat_arrays([cast_valid(texts[:half]), cast_valid(texts[half:])])


def zone_seconds(zone: str | None) -> int | None:
    """Return the offset of a zone such as Z, UTC, +01, +0100 or -01:30, in seconds; 0 for ""; None if it is none."""
    if zone is None:
        return None
    if zone in ("", "Z", "UTC"):
        return 0
    digits = zone.replace(":", "")[1:]
    hours, minutes = int(digits[:2]), int(digits[2:] or 0)
    return (3600 * hours + 60 * minutes) * (-1 if zone[0] == "-" else 1) if hours < 24 and minutes < 60 else None


def parse_year_last(texts: pa.Array, day_first: bool) -> pa.Array:
    """Return dates such as 31/12/2024 or 31.12.2024 14:05 as times in microseconds (UTC), null for other texts."""
    parts = pc.extract_regex(texts, YEAR_LAST)
    first, second = (pc.utf8_lpad(parts.field(name), 2, "0") for name in ("first", "second"))
    month, day = (second, first) if day_first else (first, second)
    date = pc.binary_join_element_wise(parts.field("year"), month, day, "-")
    minutes = pc.binary_join_element_wise(pc.utf8_lpad(parts.field("hour"), 2, "0"), parts.field("minute"), ":")
    clock = pc.binary_join_element_wise(minutes, parts.field("seconds"), "")
    clock = pc.if_else(pc.equal(parts.field("minute"), ""), "00:00", clock)
    return parse_iso(pc.binary_join_element_wise(date, clock, " "))


def parse_times(texts: pa.Array, day_first: bool | None) -> pa.Array:
    """Return texts as times in microseconds (UTC), null where they are not times.

    ``day_first`` tells whether the day or the month of a date with the year last comes first; None refuses such dates.
    """
    if day_first is None:
        return parse_iso(texts)
    dates = parse_year_last(texts, day_first)
    if dates.null_count == texts.null_count:
        return dates
    return pc.coalesce(dates, parse_iso(texts))


def may_be_times(texts: pa.Array) -> np.ndarray:
    """Return which texts start like a time (bool ``[rows]``), by a fast, inexact check."""
    return pc.fill_null(pc.match_substring_regex(texts, TIMELIKE), False).to_numpy(zero_copy_only=False)
