"""Users' TOML files: profiles, prices, schedules, limits."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from slipstream.shared.errors import UserError

#: Largest file and deepest nesting. This project's largest file has 6 KiB.
LARGEST_BYTES, DEEPEST = 2**20, 32
#: Range that a TOML parser has to support (TOML 1.0, "Integer").
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1
#: Key with more parts than the nesting limit. ``tomllib`` takes 4 GiB for a key of 32,000 parts.
DEEP_KEY = re.compile(rf"""(?<![\w-])(?:[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.){{{DEEPEST}}}""")
TOO_DEEP = f"is nested too deeply; expected at most {DEEPEST} levels"
TOO_LONG = "holds a whole number of more than 64 bits; expected smaller numbers, or text in quotes"


class BadToml(ValueError):
    """Error for a file that is not TOML or exceeds a limit of this module; its text gives the reason."""


def read_toml(path: Path, missing: str = "") -> dict[str, Any]:
    """Return the tables of a file.

    Integers have at most 64 bits, and nesting has at most :data:`DEEPEST` levels. Raises ``UserError``, with the
    message ``missing``, if given, for a file that does not exist.
    """
    try:
        return parse_toml(path)
    except FileNotFoundError:
        raise UserError(missing or f"{path}: no such file; expected a TOML file") from None
    except (OSError, BadToml) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def parse_toml(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise BadToml(f"is larger than {LARGEST_BYTES // 2**20} MiB; expected a smaller file")
    try:
        # As `Path.read_text` does: tomllib rejects a lone carriage return.
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        if DEEP_KEY.search(text):
            raise BadToml(TOO_DEEP)
        tables = tomllib.loads(text)
    except RecursionError:
        raise BadToml(TOO_DEEP) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, BadToml) as error:
        raise BadToml(str(error)) from None
    except ValueError:  # Python limits the digits that it converts
        raise BadToml(TOO_LONG) from None
    check_values(tables)
    return tables


def check_values(tables: dict[str, Any]) -> None:
    """Raise ``BadToml`` if an integer is too long or a table is nested too deeply."""
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        below = [each for holder in level for each in (holder.values() if isinstance(holder, dict) else holder)]
        if any(type(each) is int and not SMALLEST_INTEGER <= each <= LARGEST_INTEGER for each in below):
            raise BadToml(TOO_LONG)
        level = [each for each in below if isinstance(each, dict | list)]
    if level:
        raise BadToml(TOO_DEEP)
