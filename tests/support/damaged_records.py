"""Damage to records, from cut files to forged content, and the readers that must survive it."""

import copy
import json
from collections.abc import Iterator
from typing import Any

#: Not JSON, not an object, or nested so deeply that a recursive parser fails.
CONTENTS = {
    "nothing": b"",
    "cut": b'{"a": ',
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "not UTF-8": b"\xff\xfe\x00",
    "lists of lists": b"[" * 100_000,
    "objects of objects": b'{"a":' * 50_000,
    "twice": b"{}{}",
}
#: The contents that are valid JSON.
JSON = ("a list", "null", "a number")
DEEP = "deep"
#: Values that no writer writes anywhere, and that Python's parser accepts.
NEVER: dict[str, object] = {
    "10^400": 10**400,
    "2^64": 1 << 64,
    "-10^19": -(10**19),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "half a surrogate pair": "\ud800",
    "200 lists": DEEP,
}
#: Values that are right in some places.
PERHAPS: dict[str, object] = {
    "null": None,
    "true": True,
    "-1": -1,
    "2^63": 1 << 63,
    "1e308": 1e308,
    "superscript two": "²",
    "an empty list": [],
    "an empty object": {},
    "a list of lists": [[1]],
    "an object": {"²": "²"},
    "a long text": "x" * (1 << 16),
}


def text_of(tree: object) -> bytes:
    deep = f"{'[' * 200}{']' * 200}"
    return json.dumps(tree).replace(json.dumps(DEEP), deep).encode()


def paths_in(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below the top, the first element of a list standing for all."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield (*path, name)
            yield from paths_in(value, (*path, name))
    elif isinstance(tree, list) and tree:
        yield (*path, 0)
        yield from paths_in(tree[0], (*path, 0))


def changed(tree: object, path: tuple[Any, ...], value: object) -> object:
    whole = {"": copy.deepcopy(tree)}
    within: Any = whole
    for step in ("", *path[:-1]):
        within = within[step]
    within[path[-1]] = value
    return whole[""]


def without(tree: object, path: tuple[Any, ...]) -> object:
    whole: Any = copy.deepcopy(tree)
    within = whole
    for step in path[:-1]:
        within = within[step]
    del within[path[-1]]
    return whole


def damages(good: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Yield every damage to the bytes of a good record: what it is, the bytes, and whether they are never a record."""
    for name, content in CONTENTS.items():
        yield name, content, True
    yield "half", good[: len(good) // 2], True
    tree = json.loads(good)
    for path in paths_in(tree):
        where = ".".join(map(str, path))
        yield f"{where} is missing", text_of(without(tree, path)), False
        for name, value in NEVER.items():
            yield f"{where} is {name}", text_of(changed(tree, path, value)), True
        for name, value in PERHAPS.items():
            yield f"{where} is {name}", text_of(changed(tree, path, value)), False
