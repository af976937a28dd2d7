"""What may be the name of a file below a directory or a prefix.

Names come from outside: from listings of stores, and from manifests and other JSON that somebody else may have written.
Every one of them is checked here before anything is read or written by it, so that a name can only lead below the place
that it is meant for, on every system on which the files may land.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import UserError

#: The most digits of a number in a name: it fits into 64 bits, signed or not, and so does its successor.
MOST_DIGITS = 18
#: Bytes of UTF-8 in a name, as in the keys of S3 and Google's store, and in each of its parts: Linux has 255, of which
#: some are left for what is put after the name of a file until it is whole.
LONGEST, LONGEST_PART = 1024, 200
#: Unicode's categories of characters that control a terminal, break a line or are no text.
UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
DRIVE = re.compile(r"[A-Za-z]:")
EXPECTED = "expected a relative path with / between its parts, none of them empty, . or .."


def fault(name: str) -> str:
    """Why ``name`` is no relative path that stays below its directory; "" if it is one."""
    if not name:
        return "is empty"
    if any(unicodedata.category(letter) in UNPRINTABLE for letter in name):
        return "has an unprintable character"
    if "\\" in name:
        return "has a backslash"
    if name.startswith(("/", "~")) or DRIVE.match(name):
        return "is not relative"
    parts = name.split("/")
    if "" in parts:
        return "has an empty part"
    if odd := next((part for part in parts if part in (".", "..")), ""):
        return f"has the part {odd!r}"
    if len(name.encode()) > LONGEST or max(len(part.encode()) for part in parts) > LONGEST_PART:
        return "is too long"
    return ""


def check_name(name: str, where: object, error: type[UserError] = UserError) -> str:
    """``name`` itself. Raises ``error``, which names the address ``where`` it was found, unless it is a safe one."""
    if why := fault(name):
        shown = repr(name)
        raise error(f"{where}: the name {shown if len(shown) <= 100 else f'{shown[:99]}…'} {why}; {EXPECTED}")
    return name


def check_keys(keys: Iterable[str], where: object) -> list[str]:
    """The keys that a store lists at ``where``, sorted, without those by which consoles mark directories. Raises
    ``UserError`` if one of them is no safe name."""
    return sorted(check_name(key, where) for key in keys if not key.endswith("/"))


def check_prefix(prefix: str, where: object) -> str:
    """``prefix`` itself, with which names begin. Raises ``UserError`` if that leads out of the place ``where``."""
    if directory := prefix.rpartition("/")[0]:
        check_name(directory, where)
    return prefix


def path_below(directory: Path, name: str, where: object = "") -> Path:
    """The file ``name`` below ``directory``, to be written or read. Raises ``UserError``, which names ``where`` (the
    directory, if it is not given), unless the name is safe and no symbolic link stands in its way."""
    path = directory
    for part in check_name(name, where or directory).split("/"):
        path /= part
        if path.is_symlink():
            raise UserError(f"{where or directory}: {path} is a symbolic link; expected a file or directory there")
    return path


def number_in_name(digits: str, width: int = 0) -> int | None:
    """Return the number that a part of a name stands for, or None unless it is written as our writers do: at most
    :data:`MOST_DIGITS` ASCII digits, with zeros only up to ``width``. No number has two names."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        return None
    number = int(digits)
    return number if digits == f"{number:0{width}d}" else None


def number_as_name(number: int, width: int = 0) -> str:
    """Return a number as part of a name, with zeros up to ``width`` digits, as :func:`number_in_name` reads it. Raises
    ``UserError`` for one of more than :data:`MOST_DIGITS` digits."""
    if number >= 10**MOST_DIGITS:
        raise UserError(
            f"the number {number} is the next in a name and has more than {MOST_DIGITS} digits; expected fewer, so "
            f"delete what is stored under {number - 1}"
        )
    return f"{number:0{width}d}"
