"""Inputs of a node from its bindings (propeller: ``nodes/resolve.go``, ``nodes/attr_path_resolver.go``).

A path into a dataclass is followed through its MessagePack, and what is found there is packed again in the order in
which Go ranges over a map: another one each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
from flyteidl.core.literals_pb2 import Binding, BindingData, Literal
from flyteidl.core.types_pb2 import PromiseAttribute

#: The outputs of the nodes that have ended, by node and name. The inputs of the workflow are those of the start node.
Outputs = Mapping[str, Mapping[str, Literal]]
START = "start-node"


def resolve_all(bindings: Iterable[Binding], outputs: Outputs, draw: random.Random) -> dict[str, Literal]:
    return {binding.var: resolve(binding.binding, outputs, draw) for binding in bindings}


def resolve(data: BindingData, outputs: Outputs, draw: random.Random) -> Literal:
    """The literal that ``data`` stands for; ``draw`` gives the order of the keys of a map that is packed again."""
    kind = data.WhichOneof("value")
    made = Literal()
    if kind == "scalar":
        made.scalar.CopyFrom(data.scalar)
    elif kind == "collection":
        made.collection.SetInParent()
        made.collection.literals.extend(resolve(each, outputs, draw) for each in data.collection.bindings)
    elif kind == "map":
        made.map.SetInParent()
        for name, each in data.map.bindings.items():
            made.map.literals[name].CopyFrom(resolve(each, outputs, draw))
    elif kind == "promise":
        found = outputs[data.promise.node_id or START][data.promise.var]
        return follow(found, list(data.promise.attr_path), draw) if data.promise.attr_path else found
    return made


def follow(literal: Literal, path: list[PromiseAttribute], draw: random.Random) -> Literal:
    """What lies at ``path`` in ``literal``. A hash of the whole is no hash of its parts."""
    while path and literal.WhichOneof("value") in ("map", "collection"):
        attribute, path = path[0], path[1:]
        if literal.WhichOneof("value") == "map":
            literal = literal.map.literals[attribute.string_value]
        else:
            literal = literal.collection.literals[attribute.int_value]
    if literal.scalar.WhichOneof("value") != "binary":
        return literal
    value = msgpack.unpackb(literal.scalar.binary.value, strict_map_key=False)
    for attribute in path:
        value = value[getattr(attribute, str(attribute.WhichOneof("value")))]
    made = Literal()
    if isinstance(value, list):
        made.collection.SetInParent()
        made.collection.literals.extend(packed(each, literal.scalar.binary.tag, draw) for each in value)
        return made
    if isinstance(value, (bool, int, float, str)):
        # bool first: in Python it is an int.
        names = {bool: "boolean", int: "integer", float: "float_value", str: "string_value"}
        setattr(made.scalar.primitive, names[type(value)], value)
        return made
    return packed(value, literal.scalar.binary.tag, draw)


def packed(value: Any, tag: str, draw: random.Random) -> Literal:
    made = Literal()
    made.scalar.binary.value = msgpack.packb(shuffled(value, draw))
    made.scalar.binary.tag = tag
    return made


def shuffled(value: Any, draw: random.Random) -> Any:
    """The same value with the keys of all its maps in another order."""
    if isinstance(value, list):
        return [shuffled(each, draw) for each in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    draw.shuffle(names)
    return {name: shuffled(value[name], draw) for name in names}
