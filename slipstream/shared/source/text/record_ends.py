"""Record ends in delimited text: line breaks outside quotes, as Python's csv module and Arrow define them.

A quote at the start of a value opens quotes; later in an unquoted value it is an ordinary character (``6" nail``).
Inside quotes it closes them, unless doubled. Therefore a run of an even number of quotes changes nothing. An odd run
where a value may start opens quotes or, inside quotes, closes them. After an odd run anywhere else, the text is outside
quotes, whatever came before. So from the first such run on, the state is known without reading earlier bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slipstream.shared.source.config import DataConfig

#: Number of last bytes examined first, and the factor by which it grows while they do not show what is quoted.
LOOK_BYTES, TIMES_MORE = 64 << 10, 16
#: First line break; a CR at the end of the data does not count, as an LF may follow.
FIRST_BREAK = re.compile(rb"\n|\r\n|\r(?=[^\n])")


class QuoteRuns(NamedTuple):
    """Runs of an odd number of quotes in the bytes from ``start`` on.

    ``at`` (int64 ``[runs]``) are their offsets, ``inside`` (bool ``[runs]``) is True if the text after a run is quoted.
    Text before the offset ``known`` may be quoted or not.
    """

    start: int
    at: np.ndarray
    inside: np.ndarray
    known: int


def last_record_end(data: bytes, config: DataConfig) -> int:
    """Return the number of bytes of complete records at the start of ``data``, or 0 if the first is incomplete."""
    plain = without_escapes(data, config)
    if not config.quote or config.quote.encode() not in plain:
        lf = plain.rfind(b"\n")
        return 1 + max(lf, plain.rfind(b"\r", lf + 1, len(plain) - 1))
    for runs in quote_runs(plain, config):
        breaks = runs.start + breaks_in(np.frombuffer(plain, np.uint8, offset=runs.start))
        breaks = breaks[breaks >= runs.known]
        # There are no quotes before the first run (index -1).
        inside = np.append(runs.inside, False)[np.searchsorted(runs.at, breaks) - 1]
        if not inside.all():
            return 1 + int(breaks[~inside][-1])
    return 0


def ends_in_quotes(data: bytes, config: DataConfig) -> bool:
    """Return True if a quote is open at the end of ``data``, which must start with a record."""
    if not config.quote or config.quote.encode() not in data:
        return False
    runs = next(quote_runs(without_escapes(data, config), config))
    return bool(runs.inside[-1:].any())


def first_line_end(data: bytes) -> int:
    """Return the length of the first line including its break; 0 if it has none."""
    found = FIRST_BREAK.search(data)
    return found.end() if found else 0


def count_breaks(data: bytes, end: int) -> int:
    """Return the number of line breaks (LF, CR LF or CR) in ``data[:end]``."""
    return data.count(b"\n", 0, end) + data.count(b"\r", 0, end) - data.count(b"\r\n", 0, end)


def without_escapes(data: bytes, config: DataConfig) -> bytes:
    """Return ``data`` with escaped characters masked, at the same length."""
    if not config.escape:
        return data
    return re.sub(re.escape(config.escape.encode()) + b".", b"__", data, flags=re.DOTALL)


def quote_runs(data: bytes, config: DataConfig) -> Iterator[QuoteRuns]:
    """Yield the runs in growing tails of ``data`` that show what is quoted, and last in all of ``data``."""
    size = LOOK_BYTES
    while size < len(data):
        runs = runs_from(len(data) - size, data, config)
        if runs.known < len(data):
            yield runs
        size *= TIMES_MORE
    yield runs_from(0, data, config)


def runs_from(start: int, data: bytes, config: DataConfig) -> QuoteRuns:
    view = np.frombuffer(data, np.uint8, offset=start)
    quotes = np.flatnonzero(view == ord(config.quote))
    first = np.flatnonzero(np.diff(quotes, prepend=-2) > 1)
    at = quotes[first[np.diff(first, append=len(quotes)) % 2 == 1]]
    before_values = np.frombuffer(f"{config.delimiter or ','}\r\n".encode(), np.uint8)
    # A value that starts at ``start`` may have started earlier, so it is as inconclusive as a value start.
    begins = np.isin(view[at - 1], before_values) | (at == 0)
    toggles = np.cumsum(begins)
    inside = (toggles - np.maximum.accumulate(np.where(begins, 0, toggles))) % 2 == 1
    closing = at[~begins]
    known = start + int(closing[0]) if len(closing) else len(data)
    return QuoteRuns(start, start + at, inside, known if start else 0)


def breaks_in(view: np.ndarray) -> np.ndarray:
    """Return the offset of the last byte of every line break (int64 ``[lines]``)."""
    is_break = view == ord("\n")
    cr = np.flatnonzero(view[:-1] == ord("\r"))
    is_break[cr[view[cr + 1] != ord("\n")]] = True
    return np.flatnonzero(is_break)
