"""Cache of task outputs and its keys (``catalog/hashing.go``, ``nodes/cache.go``)."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping

from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate


def cache_key(task: TaskTemplate, inputs: Mapping[str, Literal]) -> str:
    """Return a digest of the task's name, interface, cache version and inputs.

    Propeller hashes JSON, but only equality of keys matters here.
    """
    ignored = task.metadata.cache_ignore_input_vars
    counted = {name: hashified(each) for name, each in inputs.items() if name not in ignored}
    parts = (
        task.id.name.encode(),
        task.metadata.discovery_version.encode(),
        task.interface.SerializeToString(deterministic=True),
        LiteralMap(literals=counted).SerializeToString(deterministic=True),
    )
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def hashified(literal: Literal) -> Literal:
    """Return the literal with every part that has a hash, also in lists and maps, replaced by the hash alone."""
    if literal.hash:
        return Literal(hash=literal.hash)
    made = Literal()
    kind = literal.WhichOneof("value")
    if kind == "collection":
        made.collection.SetInParent()
        made.collection.literals.extend(hashified(each) for each in literal.collection.literals)
        return made
    if kind == "map":
        made.map.SetInParent()
        for name, each in literal.map.literals.items():
            made.map.literals[name].CopyFrom(hashified(each))
        return made
    return literal


class Catalog:
    """Outputs of cached tasks of all executions. A reservation serialises the work on one key."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Literal]] = {}
        self.reservations: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def find(self, key: str) -> dict[str, Literal] | None:
        return self.entries.get(key)

    def keep(self, key: str, outputs: dict[str, Literal]) -> None:
        self.entries[key] = outputs

    def reservation(self, key: str) -> threading.Lock:
        return self.reservations[key]
