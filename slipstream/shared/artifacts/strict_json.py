"""Strict JSON parser for possibly untrusted or damaged files of artifacts and stores.

Accepted values are safe for all other code: numbers are finite and of 64 bits, texts can be encoded as UTF-8, and
nesting is bounded. Floats keep all their bits.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

#: Largest nesting depth of lists and objects. This project's records need about a dozen; Python's recursion limit is
#: about 1,000.
DEEPEST = 100
#: Range of 64-bit integers, signed or unsigned.
LEAST, MOST = -(1 << 63), (1 << 64) - 1


def parse_json(content: bytes) -> Any:
    """Parse UTF-8 JSON.

    Raises ``ValueError`` for invalid JSON, non-finite numbers, integers of more than 64 bits and more than
    :data:`DEEPEST` levels.
    """
    try:
        value = json.loads(content.decode(), parse_constant=refuse_number)
    except RecursionError:
        raise too_deep() from None
    check_json(value)
    return value


def check_json(value: object) -> None:
    """Raise ``ValueError`` if a parsed value has a number, text or depth that :func:`parse_json` refuses."""
    level = [value]
    for depth in range(DEEPEST + 1):
        deeper = list[object]()
        for one in level:
            if isinstance(one, (dict, list)):
                if depth == DEEPEST:
                    raise too_deep()
                deeper += one
                if isinstance(one, dict):
                    deeper += one.values()
            elif isinstance(one, str):
                if not one.isascii():
                    one.encode()  # half of a surrogate pair, which JSON can escape, cannot be encoded
            elif isinstance(one, float):
                if not math.isfinite(one):
                    refuse_number(str(one))
            elif isinstance(one, int) and not LEAST <= one <= MOST:
                raise ValueError("an integer has more than 64 bits")
        level = deeper


def refuse_number(number: str) -> NoReturn:
    raise ValueError(f"{number} is not a finite number")


def too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested more than {DEEPEST} levels deep")
