"""Seeded changes of bytes and of JSON, as accidents and attacks make them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.support.hostile_names import HOSTILE

#: What takes the place of a value: wrong types, the ends of number types, what leads elsewhere, what is deep or long.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320),
    *("", " ", "0", "nan", "name", "\x1b[2J", "{{ 7 * 7 }}", "os:system", "torch:load", "a" * 5000, *HOSTILE),
    *([], {}, [[]], {"": None}, [None] * 50, {"__class__": "x"}, [{}], {"a": {"a": {"a": []}}}),
)
#: What JSON's own rules leave to its readers.
RAW = (b"NaN", b"-Infinity", b"1e999", b"-0", b'"\\ud800"', b'"\\u0000"', b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe")


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    """``data`` with some bits flipped, cut, doubled, zeroed or inserted."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice([1, 1, 4, 64, 4096]))
        what = draw.randrange(6)
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del changed[at:]
        elif what == 2:
            changed[at:to] = bytes(to - at)
        elif what == 3:
            changed[at:at] = changed[at:to]
        elif what == 4:
            del changed[at:to]
        else:
            changed[at:at] = draw.choice(RAW)
    return bytes(changed)


def changed_tree(draw: random.Random, tree: Any) -> Any:
    """A copy of a JSON value in which some values are others, have gone, are there twice, or have another name."""
    box = [copy.deepcopy(tree)]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        holder: Any = box
        key: Any = 0
        while holder[key] and isinstance(holder[key], list | dict) and draw.random() < 0.85:
            holder = holder[key]
            key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        what = draw.random()
        if what < 0.6 or holder is box:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        elif what < 0.75:
            del holder[key]
        elif isinstance(holder, dict):
            name = draw.choice([*HOSTILE, "name", "", key + "_", key.upper()])
            holder[name] = copy.deepcopy(holder[key]) if what < 0.9 else holder.pop(key)
        else:
            holder.insert(key, copy.deepcopy(draw.choice([holder[key], *VALUES])))
    return box[0]


def changed_json(draw: random.Random, data: bytes) -> bytes:
    """A JSON file with another value, or with other bytes."""
    if draw.random() < 0.2:
        return changed_bytes(draw, data)
    return json.dumps(changed_tree(draw, json.loads(data)), ensure_ascii=draw.random() < 0.5).encode(
        errors="surrogatepass"
    )
