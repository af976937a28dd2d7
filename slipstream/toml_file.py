"""TOML files of users: profiles, prices, schedules, limits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The largest file, and the deepest nesting. The largest file that comes with this project has 6 KiB.
LARGEST_BYTES, DEEPEST = 2**20, 32
#: What a TOML parser has to hold (TOML 1.0, "Integer").
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1
#: A key of more parts than may be nested. ``tomllib`` takes 4 GiB for one of 32,000 parts.
DEEP_KEY = re.compile(rf"""(?<![\w-])(?:[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.){{{DEEPEST}}}""")
TOO_DEEP = f"is nested too deeply; expected at most {DEEPEST} levels"
TOO_LONG = "holds a whole number of more than 64 bits; expected smaller numbers, or text in quotes"


class BadToml(ValueError):
    """A file that is no TOML or exceeds a limit of this module; its text says why."""


def read_toml(path: Path, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """Return the tables of a file.

    Every whole number has at most 64 bits and nothing is nested deeper than :data:`DEEPEST`. Raises ``BadToml`` and
    ``OSError``.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise BadToml(f"is larger than {LARGEST_BYTES // 2**20} MiB; expected a file that somebody wrote")
    try:
        # As `Path.read_text` does: tomllib takes no carriage return alone.
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        if DEEP_KEY.search(text):
            raise BadToml(TOO_DEEP)
        tables = tomllib.loads(text, parse_float=parse_float)
    except RecursionError:
        raise BadToml(TOO_DEEP) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, BadToml) as error:
        raise BadToml(str(error)) from None
    except ValueError:  # Python converts no number of so many digits
        raise BadToml(TOO_LONG) from None
    except ArithmeticError:  # nor a Decimal of such an exponent
        raise BadToml("holds a number whose exponent is too large; expected a smaller one") from None
    check_values(tables)
    return tables


def check_values(tables: dict[str, Any]) -> None:
    """Raise ``BadToml`` if a whole number is too long or a table is nested too deeply."""
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        below = [each for holder in level for each in (holder.values() if isinstance(holder, dict) else holder)]
        if any(type(each) is int and not SMALLEST_INTEGER <= each <= LARGEST_INTEGER for each in below):
            raise BadToml(TOO_LONG)
        level = [each for each in below if isinstance(each, dict | list)]
    if level:
        raise BadToml(TOO_DEEP)
