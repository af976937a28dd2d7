"""Safe names of files below a directory or a prefix.

Names are untrusted: they come from listings of stores, manifests and other JSON. They are checked here before use, so
that they stay below their directory on every operating system.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from slipstream.shared.errors import UserError

#: Largest number of digits of a number in a name: the number and its successor fit in 64 bits, signed or not.
MOST_DIGITS = 18
#: Largest number of UTF-8 bytes of a name, as in keys of S3 and Google's store, and of a component of it: 255 on Linux,
#: less the suffix of an unfinished file.
LONGEST, LONGEST_PART = 1024, 200
#: Unicode categories of characters that control a terminal, break a line or are not text.
UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
DRIVE = re.compile(r"[A-Za-z]:")
EXPECTED = "expected a relative path with / between its parts, none of them empty, . or .."


def name_fault(name: str) -> str:
    """Return why ``name`` is not a relative path that stays below its directory; "" if it is safe."""
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
    """Return ``name`` if it is safe, else raise ``error``, whose message starts with its origin ``where``."""
    if why := name_fault(name):
        shown = repr(name)
        raise error(f"{where}: the name {shown if len(shown) <= 100 else f'{shown[:99]}…'} {why}; {EXPECTED}")
    return name


def check_keys(keys: Iterable[str], where: object) -> list[str]:
    """Return the keys that a store lists at ``where``, sorted, without directory markers (names that end with a slash).

    Raises ``UserError`` if a key is unsafe.
    """
    return sorted(check_name(key, where) for key in keys if not key.endswith("/"))


def check_prefix(prefix: str, where: object) -> str:
    """Return ``prefix`` if it is safe, else raise ``UserError``."""
    if directory := prefix.rpartition("/")[0]:
        check_name(directory, where)
    return prefix


def path_below(directory: Path, name: str, where: object = "") -> Path:
    """Return the path of the file ``name`` below ``directory``.

    Raises ``UserError``, which starts with ``where`` (default: the directory), if the name is unsafe or the path
    contains a symbolic link.
    """
    path = directory
    for part in check_name(name, where or directory).split("/"):
        path /= part
        if path.is_symlink():
            raise UserError(f"{where or directory}: {path} is a symbolic link; expected a file or directory there")
    return path


def number_in_name(digits: str, width: int = 0) -> int | None:
    """Return the number in part of a name, or None unless it has the form of :func:`number_as_name`.

    This form is at most :data:`MOST_DIGITS` ASCII digits, zero-padded only to ``width``, so no number has two names.
    """
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        return None
    number = int(digits)
    return number if digits == f"{number:0{width}d}" else None


def number_as_name(number: int, width: int = 0) -> str:
    """Return a number as part of a name, zero-padded to ``width`` digits.

    Raises ``UserError`` for more than :data:`MOST_DIGITS` digits.
    """
    if number >= 10**MOST_DIGITS:
        raise UserError(
            f"the next number for a name is {number}, which has more than {MOST_DIGITS} digits; delete the files "
            f"stored under {number - 1}"
        )
    return f"{number:0{width}d}"
