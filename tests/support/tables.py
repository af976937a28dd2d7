"""Small tables as text, and their prepared rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.shared.artifacts.format import MANIFEST, canonical_json, hash_file
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData

#: The fixture ``prepared``: prepares a text, table or path and opens what was made.
Prepare = Callable[..., PreparedData]


def table_text(rows: int, seed: int = 0) -> str:
    """A CSV with the columns number, city (a category) and y (yes or no), without missing values."""
    draw = np.random.default_rng(seed)
    numbers, cities = draw.normal(5, 2, rows), draw.choice(["Oslo", "Rome", "Lima"], rows)
    labels = np.where(numbers > 5, "yes", "no")
    lines = [f"{n:.6f},{c},{y}" for n, c, y in zip(numbers, cities, labels, strict=True)]
    return "number,city,y\n" + "\n".join(lines) + "\n"


def everything(data: PreparedData) -> np.ndarray:
    """The records of all splits together."""
    return np.concatenate([data.split(name) for name in SPLITS])


def with_types(data: PreparedData) -> dict[str, tuple[str, str]]:
    """Type and role of each column, as the card has them."""
    return {column["name"]: (column["type"], column["role"]) for column in data.card["columns"]}


def vouch_for(directory: Path, name: str, content: bytes) -> None:
    """Put the content into a file, and its record into the manifest."""
    (directory / name).write_bytes(content)
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
    manifest["files"][name] = vars(hash_file(directory / name, manifest["files"][name]["block_bytes"]))
    (directory / MANIFEST).write_bytes(canonical_json(manifest))
