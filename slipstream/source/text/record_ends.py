"""Where the records of delimited text end: at a line break outside quotes, as Python's csv module and Arrow see it.

A quote opens where a value begins; in a value that does not begin with one it is a character like any other
(``6" nail``). Inside quotes it closes, unless doubled. So of a run of quotes an even number changes nothing. An odd
number where a value may begin opens or, inside quotes, closes. An odd number anywhere else leaves what follows outside
quotes, whatever came before: from the first of these on, all is known without reading what lies before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slipstream.source.config import DataConfig

#: As much is looked at first, from the end on, and as many times more if that does not tell.
LOOK_BYTES, TIMES_MORE = 64 << 10, 16
#: CR at the end may be half of CR LF.
FIRST_BREAK = re.compile(rb"\n|\r\n|\r(?=[^\n])")


class Runs(NamedTuple):
    """In the bytes from ``start`` on, where runs of an odd number of quotes begin (int64 ``[runs]``), and whether what
    follows each of them is inside quotes (bool). Before ``known`` nothing is known."""

    start: int
    at: np.ndarray
    inside: np.ndarray
    known: int


def last_record_end(data: bytes, config: DataConfig) -> int:
    """How many bytes of ``data``, which begins with a record, are whole records; 0 if the first one does not end."""
    plain = without_escapes(data, config)
    if not config.quote or config.quote.encode() not in plain:
        lf = plain.rfind(b"\n")
        return 1 + max(lf, plain.rfind(b"\r", lf + 1, len(plain) - 1))
    for runs in looks(plain, config):
        breaks = runs.start + breaks_in(np.frombuffer(plain, np.uint8, offset=runs.start))
        breaks = breaks[breaks >= runs.known]
        # Before the first run, which has the index -1, there is no quote.
        inside = np.append(runs.inside, False)[np.searchsorted(runs.at, breaks) - 1]
        if not inside.all():
            return 1 + int(breaks[~inside][-1])
    return 0


def ends_in_quotes(data: bytes, config: DataConfig) -> bool:
    """Whether a quote is open at the end of ``data``, which begins with a record."""
    if not config.quote or config.quote.encode() not in data:
        return False
    runs = next(looks(without_escapes(data, config), config))
    return bool(runs.inside[-1:].any())


def first_line_end(data: bytes) -> int:
    """How many bytes the first line has, with its break; 0 if it has none."""
    found = FIRST_BREAK.search(data)
    return found.end() if found else 0


def count_breaks(data: bytes, end: int) -> int:
    """How many lines end before ``end``, by LF, CR LF or CR."""
    return data.count(b"\n", 0, end) + data.count(b"\r", 0, end) - data.count(b"\r\n", 0, end)


def without_escapes(data: bytes, config: DataConfig) -> bytes:
    """The same number of bytes, in which no escaped quote or line break is left to be taken for a real one."""
    if not config.escape:
        return data
    return re.sub(re.escape(config.escape.encode()) + b".", b"__", data, flags=re.DOTALL)


def looks(data: bytes, config: DataConfig) -> Iterator[Runs]:
    """The runs in ever more of the end of ``data`` that tell anything; at last those in all of it."""
    size = LOOK_BYTES
    while size < len(data):
        runs = runs_from(len(data) - size, data, config)
        if runs.known < len(data):
            yield runs
        size *= TIMES_MORE
    yield runs_from(0, data, config)


def runs_from(start: int, data: bytes, config: DataConfig) -> Runs:
    view = np.frombuffer(data, np.uint8, offset=start)
    quotes = np.flatnonzero(view == ord(config.quote))
    first = np.flatnonzero(np.diff(quotes, prepend=-2) > 1)
    at = quotes[first[np.diff(first, append=len(quotes)) % 2 == 1]]
    before_values = np.frombuffer(f"{config.delimiter or ','}\r\n".encode(), np.uint8)
    # What begins at ``start`` may have begun before it: it says as little as if a value began there.
    begins = np.isin(view[at - 1], before_values) | (at == 0)
    toggles = np.cumsum(begins)
    inside = (toggles - np.maximum.accumulate(np.where(begins, 0, toggles))) % 2 == 1
    closing = at[~begins]
    known = start + int(closing[0]) if len(closing) else len(data)
    return Runs(start, start + at, inside, known if start else 0)


def breaks_in(view: np.ndarray) -> np.ndarray:
    """Where lines end: the last byte of each break (int64 ``[lines]``)."""
    is_break = view == ord("\n")
    cr = np.flatnonzero(view[:-1] == ord("\r"))
    is_break[cr[view[cr + 1] != ord("\n")]] = True
    return np.flatnonzero(is_break)
