"""Recorded requests to a model: counts of every interval, and rates by hour of the day."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TextIO

import numpy as np

from slipstream.shared.errors import UserError

TIME, REQUESTS = "time", "requests"
EXPECTED = (
    f"expected a CSV with the column {TIME}, a line for each request, or {TIME} and {REQUESTS}, a line for each "
    "interval of an hour at most"
)
HOUR_S, DAY_S = 3600, 86400
HOURS = range(24)
MONTH_S = DAY_S * 365 / 12
#: Seconds over which rates are averaged; an hour is planned for its busiest such window.
MINUTE_S = 60
#: Minimum recorded seconds that count as a day, since its last minutes may lack requests.
WHOLE_DAY_S = DAY_S - HOUR_S
#: Counting interval in seconds if the file has a line for each request.
SECOND = 1
#: Longest recording, since every minute is held in memory, and years that any time zone can represent.
LONGEST_DAYS = 3660
YEARS = range(1970, 9999)
#: Maximum requests per second in the busiest minute.
MOST_A_SECOND = 1e9


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Intervals of ``length`` seconds with requests: ``at`` are their ascending starts, ``requests`` their counts."""

    at: np.ndarray
    requests: np.ndarray
    length: int

    @property
    def gaps(self) -> np.ndarray:
        """Seconds from the start of every interval to that of the next."""
        return np.diff(self.at, append=self.at[-1] + self.length)

    @property
    def hours(self) -> np.ndarray:
        """Hour of the day of every interval."""
        return self.at % DAY_S // HOUR_S

    @property
    def minute(self) -> np.ndarray:
        """Number of every interval's minute, or of the interval if it is longer, among those with requests."""
        return np.unique(self.at // MINUTE_S, return_inverse=True)[1]

    def times(self, factors: np.ndarray | float) -> Arrivals:
        """Return as many intervals with ``factors`` times the requests."""
        return Arrivals(self.at, self.requests * factors, self.length)


@dataclass(frozen=True)
class RequestLoad:
    """Request rates by hour of the day, with statistics of the recording."""

    name: str
    #: Requests per second in the busiest minute (or longer interval) of every hour of the day.
    rates: tuple[float, ...]
    #: Requests per average month, and seconds recorded.
    month: float
    seconds: float
    #: Begin of the recording, in seconds since 1970.
    begin: int
    arrivals: Arrivals
    #: Seconds of every idle period, at the resolution of minutes or intervals.
    idle: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        return sum(self.idle) / self.seconds

    @property
    def idle_before(self) -> np.ndarray:
        """Seconds without requests before every interval of the arrivals."""
        ends = self.arrivals.at + self.arrivals.length
        return self.arrivals.at - np.concatenate([[self.begin], ends[:-1]])


def read_load(path: Path) -> RequestLoad:
    """Read a recording.

    Raises ``UserError`` naming the invalid line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            counts, length = count_requests(path, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--load {path}: cannot be read: {error}; {EXPECTED}") from None
    if sum(counts.values()) < 1:
        raise UserError(f"--load {path}: it has no requests; {EXPECTED}")
    return load_of(path.name, counts, length)


def load_of(name: str, counts: Mapping[int, float], length: int) -> RequestLoad:
    """Return the load from request counts by the start second of intervals of ``length`` seconds.

    Raises ``UserError`` for less than a day, more than :data:`LONGEST_DAYS`, or an impossible rate.
    """
    block = max(length, MINUTE_S)
    begin, end = min(counts) // block * block, -(-(max(counts) + length) // block) * block
    if end - begin < WHOLE_DAY_S:
        raise UserError(
            f"--load {name}: covers {(end - begin) / HOUR_S:.3g} h; expected a day or more, as replicas are planned "
            "for each hour of the day"
        )
    if end - begin > LONGEST_DAYS * DAY_S:
        raise UserError(
            f"--load {name}: covers {(end - begin) / DAY_S:,.0f} days, from {said(min(counts))} to "
            f"{said(max(counts))}; expected {LONGEST_DAYS:,} at most; correct the times that are wrong"
        )
    at = np.array(sorted(each for each in counts if counts[each]))
    requests = np.array([counts[each] for each in at.tolist()], dtype=float)
    blocks = np.bincount((at - begin) // block, requests, minlength=(end - begin) // block)
    if blocks.max() / block > MOST_A_SECOND:
        raise UserError(
            f"--load {name}: has {blocks.max() / block:.3g} requests a second in its busiest minute; expected at most "
            f"{MOST_A_SECOND:g}; correct the column {REQUESTS}"
        )
    hours = (begin + block * np.arange(len(blocks))) % DAY_S // HOUR_S
    rates = tuple(float(blocks[hours == hour].max(initial=0.0)) / block for hour in HOURS)
    arrivals = Arrivals(at, requests, length)
    idle = tuple(float(block * len(list(spell))) for empty, spell in groupby(blocks == 0) if empty)
    month = float(blocks.sum()) * MONTH_S / (end - begin)
    return RequestLoad(name, rates, month, float(end - begin), begin, arrivals, idle)


def said(second: int) -> str:
    """Return the ISO date of a second since 1970."""
    return (datetime(1970, 1, 1) + timedelta(seconds=second)).date().isoformat()


def count_requests(path: Path, file: TextIO) -> tuple[dict[int, float], int]:
    """Return the number of requests in each interval of a recording, and the length of an interval in seconds.

    An interval's key is its start in seconds since 1970, in the time zone of the first row.
    """
    reader = csv.reader(file)
    header = [name.strip().lower() for name in next(reader, [])]
    if header.count(TIME) != 1 or header.count(REQUESTS) > 1:
        raise UserError(f"--load {path}: its first line is {','.join(header) or 'empty'}; {EXPECTED}")
    time_at, count_at = header.index(TIME), header.index(REQUESTS) if REQUESTS in header else None
    counts, first = defaultdict[int, float](float), None
    for row in filter(None, reader):
        where = f"--load {path}: line {reader.line_num}"
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} values; expected {len(header)}, as in the first line")
        at = parse_time(where, row[time_at])
        first = first or at
        counts[second(where, at, first)] += 1.0 if count_at is None else requests_of(where, row[count_at])
    if not counts:
        raise UserError(f"--load {path}: has no line below its first; {EXPECTED}")
    if count_at is not None:
        return counts, interval(path, counts)
    # Logs with minute resolution would seem to have all requests in the minute's first second.
    return counts, MINUTE_S if all(at % MINUTE_S == 0 for at in counts) else SECOND


def second(where: str, at: datetime, first: datetime) -> int:
    """Return the time ``at`` as seconds since 1970, in the zone of ``first`` if times have zones."""
    if (at.tzinfo is None) != (first.tzinfo is None):
        raise UserError(f"{where}: {TIME} {at.isoformat()}: expected all times with a zone, or all without")
    local = at.astimezone(first.tzinfo).replace(tzinfo=None) if first.tzinfo else at
    return (local - datetime(1970, 1, 1)) // timedelta(seconds=1)


def parse_time(where: str, text: str) -> datetime:
    """Parse ISO 8601 or seconds since 1970.

    Raises ``UserError`` for anything else, including times before 1970.
    """
    text, at = text.strip(), None
    with suppress(ValueError, OverflowError, OSError):
        at = datetime.fromtimestamp(float(text), UTC)
    with suppress(ValueError):
        at = at or datetime.fromisoformat(text)
    if at is None or at.year not in YEARS:
        raise UserError(
            f"{where}: {TIME} {text or 'is missing'}: expected a time such as 2026-11-01T09:00, or seconds since 1970"
        )
    return at


def requests_of(where: str, text: str) -> float:
    try:
        requests = float(text)
    except ValueError:
        requests = math.nan
    if not 0 <= requests < math.inf:
        raise UserError(f"{where}: {REQUESTS} {text.strip() or 'is missing'}: expected a number of at least 0")
    return requests


def interval(path: Path, counts: Mapping[int, float]) -> int:
    """Return the seconds of an interval, found from all starts; missing intervals had no requests."""
    begins = np.array(sorted(counts))
    between = np.diff(begins)
    length = int(between.min(initial=2 * HOUR_S))
    if HOUR_S % length or (between % length).any() or begins[0] % length:
        raise UserError(
            f"--load {path}: its times are not intervals of one length that divides an hour and starts on the hour; "
            f"expected such intervals, or the column {TIME} alone, with a line for each request"
        )
    return length
