"""Numbers in the names of files and objects: attempts, steps, trials, promotions, times."""

from __future__ import annotations

#: The most digits of a number: it fits into 64 bits, signed or not, and so does its successor.
MOST_DIGITS = 18


def number_in_name(digits: str, width: int = 0) -> int | None:
    """Return the number that a part of a name stands for, or None unless it is written as our writers do: at most
    :data:`MOST_DIGITS` ASCII digits, with zeros only up to ``width``. No number has two names."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        return None
    number = int(digits)
    return number if digits == f"{number:0{width}d}" else None
