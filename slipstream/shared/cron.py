"""Cron expressions, in UTC, that both flytekit and Flyte's scheduler accept.

flytekit reads them on registration (croniter), the scheduler when it runs (``robfig/cron``, ``ParseStandard``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
#: Name, lowest number, highest number and words (for the numbers from the lowest on) of every field.
FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, MONTHS),
    ("day of the week", 0, 6, DAYS),
)
#: Part of a field: a value, a range or all (``*``, ``?``), with an optional step.
ITEM = re.compile(r"(?:[*?]|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")
#: Years that Flyte's scheduler looks ahead.
YEARS = 5


def cron_error(expression: str) -> str:
    """Return the error of an invalid expression, as "expected …" or "it never …"; "" if it is valid."""
    from croniter.croniter import CroniterBadDateError, CroniterError

    if expression not in NICKNAMES:
        fields = expression.split()
        if len(fields) != len(FIELDS):
            nicknames = ", ".join(NICKNAMES)
            return (
                f"expected five fields (minute, hour, day of the month, month, day of the week), or one of {nicknames}"
            )
        for text, (name, lowest, highest, words) in zip(fields, FIELDS, strict=True):
            if not all(is_item(item, lowest, highest, words) for item in text.split(",")):
                also = f" or {'/'.join(words)}" if words else ""
                article = "an" if name == "hour" else "a"
                values = f"{lowest} to {highest}{also}, as values, ranges, lists or steps"
                return f"{text!r} is not {article} {name}; expected {values}"
    try:
        next_times(expression, datetime.now(UTC), 1)
    except CroniterBadDateError:
        return f"it never fires: there is no such date within {YEARS} years"
    except CroniterError as error:
        return f"expected a cron expression ({error})"
    return ""


def is_item(item: str, lowest: int, highest: int, words: tuple[str, ...]) -> bool:
    """Return True if Flyte's scheduler accepts ``item``, a part of a field between commas."""
    match = ITEM.fullmatch(item)
    if not match or (match["step"] is not None and int(match["step"]) == 0):
        return False
    ends = [number_of(end.lower(), lowest, words) for end in (match["first"], match["last"]) if end is not None]
    return all(lowest <= end <= highest for end in ends) and ends == sorted(ends)


def number_of(text: str, lowest: int, words: tuple[str, ...]) -> int:
    """Return the value of a number or word; -1 for other texts."""
    if text in words:
        return lowest + words.index(text)
    return int(text) if text.isdecimal() else -1


def next_times(expression: str, after: datetime, count: int) -> list[datetime]:
    """Return the next ``count`` times at which the expression fires. Raises croniter's errors."""
    return list(islice(times_after(expression, after), count))


def times_after(expression: str, after: datetime) -> Iterator[datetime]:
    """Yield all times at which the expression fires, in order. Raises croniter's errors."""
    # Not at the top: reports are written on GPU images, which lack croniter.
    from croniter import croniter

    times = croniter(expression, after, ret_type=datetime, max_years_between_matches=YEARS)
    while True:
        yield times.get_next()


def utc(time: datetime) -> datetime:
    """Return the time in UTC; a time without a zone is taken as UTC."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
