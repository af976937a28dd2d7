"""Nested state as JSON and separate tensors, so that checkpoints hold no pickles.

State dictionaries mix tensors with numbers, text, tuples and dictionaries with integer keys. :func:`split` separates
the tensors, named by their paths, from a tree that JSON can hold; :func:`join` is its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def split(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree for JSON and the tensors by name. Raises ``TypeError`` with the path of a value of another type."""
    tensors: dict[str, Tensor] = {}
    return encode(value, (), tensors), tensors


def encode(value: Any, path: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    # By how many there are: a history has thousands of numbers, and the step loop waits.
    if isinstance(value, float):
        # JSON has no infinity and no NaN. Finite numbers keep all their bits.
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, (path, key), tensors) for key, item in value.items()}
        return {"$items": [[encode(k, path, tensors), encode(v, (path, k), tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, (path, i), tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Tensor):
        name = written(path)
        tensors[name] = value
        return {"$tensor": name}
    kind = type(value).__name__
    raise TypeError(f"{written(path)}: a {kind} cannot be kept in a checkpoint; use tensors, numbers and text")


def written(path: tuple[Any, ...]) -> str:
    """The path as text; it is the pair of the outer path and the key, and empty at the top."""
    keys = []
    while path:
        path, key = path
        keys.append(str(key))
    return "/".join(reversed(keys))


def merge(first: Any, second: Any) -> Any:
    """One tree of the trees of two ranks that hold different parts of a model: mappings and lists are united (each rank
    has parameter groups of its own), all else is alike in both."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: merge(first.get(key, item), second.get(key, item)) for key, item in {**first, **second}.items()}
    if isinstance(first, list) and isinstance(second, list) and first != second:
        return first + [item for item in second if item not in first]
    return first


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`split`. What ``tensors`` lacks is left out of its mapping: it is another rank's."""
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$float" in tree:
        return float(tree["$float"])
    if "$tuple" in tree:
        return tuple(join(item, tensors) for item in tree["$tuple"])
    if "$items" in tree:
        return {join(key, tensors): join(item, tensors) for key, item in tree["$items"]}
    return {key: join(item, tensors) for key, item in tree.items() if not is_absent(item, tensors)}


def is_absent(item: Any, tensors: Mapping[str, Tensor]) -> bool:
    return isinstance(item, dict) and "$tensor" in item and item["$tensor"] not in tensors
