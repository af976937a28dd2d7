"""Nodes of a workflow: their dependencies, the inputs that bindings give them, and the branches of conditionals.

Bindings follow ``attr_path_resolver.go``. An attribute path leads through the MessagePack of a dataclass. Its value is
packed again in a random order, in which Go iterates over maps.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
from flyteidl.core.condition_pb2 import BooleanExpression, ComparisonExpression, ConjunctionExpression, Operand
from flyteidl.core.literals_pb2 import Binding, BindingData, Literal, Primitive
from flyteidl.core.types_pb2 import PromiseAttribute
from flyteidl.core.workflow_pb2 import ArrayNode, IfElseBlock, Node

#: Outputs of the nodes that have ended, by node and name. The inputs of the workflow are outputs of the start node.
Outputs = Mapping[str, Mapping[str, Literal]]
START = "start-node"


# Dependencies


def upstream(node: Node) -> set[str]:
    """Return the nodes that must end before ``node``: its stated upstream nodes, and the sources of its inputs."""
    found = set(node.upstream_node_ids)
    for binding in node.inputs:
        found |= promised(binding.binding)
    if node.HasField("branch_node"):
        block = node.branch_node.if_else
        others = [block.else_node] if block.WhichOneof("default") == "else_node" else []
        for then in [block.case.then_node, *(case.then_node for case in block.other), *others]:
            found |= upstream(then)
    return found - {START, node.id}


def promised(data: BindingData) -> set[str]:
    if data.WhichOneof("value") == "promise":
        return {data.promise.node_id or START}
    inner = [*data.collection.bindings, *data.map.bindings.values()]
    return {name for each in inner for name in promised(each)}


def needed(array: ArrayNode, size: int) -> int:
    """Return how many of the ``size`` elements of a map task must succeed (``array/handler.go``)."""
    if array.WhichOneof("success_criteria") == "min_successes":
        return array.min_successes
    return math.ceil(array.min_success_ratio * size) if array.HasField("min_success_ratio") else size


# Inputs


def resolve_all(bindings: Iterable[Binding], outputs: Outputs, draw: random.Random) -> dict[str, Literal]:
    return {binding.var: resolve(binding.binding, outputs, draw) for binding in bindings}


def resolve(data: BindingData, outputs: Outputs, draw: random.Random) -> Literal:
    """Return the literal that ``data`` refers to; ``draw`` gives the order of keys in a map that is packed again."""
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
    """Return the value at ``path`` in ``literal``. A hash of the whole literal does not apply to its parts."""
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
    """Return the same value with the keys of all its maps in another order."""
    if isinstance(value, list):
        return [shuffled(each, draw) for each in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    draw.shuffle(names)
    return {name: shuffled(value[name], draw) for name in names}


# Branches (``branch/evaluator.go``, ``branch/comparator.go``)

COMPARE = {
    ComparisonExpression.EQ: operator.eq,
    ComparisonExpression.NEQ: operator.ne,
    ComparisonExpression.GT: operator.gt,
    ComparisonExpression.GTE: operator.ge,
    ComparisonExpression.LT: operator.lt,
    ComparisonExpression.LTE: operator.le,
}
ORDERS = {ComparisonExpression.GT, ComparisonExpression.GTE, ComparisonExpression.LT, ComparisonExpression.LTE}


class MalformedBranch(Exception):
    """Condition that propeller refuses: the node fails without retries."""


def decide(block: IfElseBlock, inputs: Mapping[str, Literal]) -> Node:
    """Return the node of the first condition that holds, or else of the block's default.

    Raises ``MalformedBranch`` if there is none, or if operands are not primitives of one type.
    """
    for case in (block.case, *block.other):
        if holds(case.condition, inputs):
            return case.then_node
    if block.WhichOneof("default") == "else_node":
        return block.else_node
    raise MalformedBranch(block.error.message or "no branch satisfied")


def holds(expression: BooleanExpression, inputs: Mapping[str, Literal]) -> bool:
    if expression.WhichOneof("expr") == "conjunction":
        both = expression.conjunction
        left, right = holds(both.left_expression, inputs), holds(both.right_expression, inputs)
        return (left or right) if both.operator == ConjunctionExpression.OR else (left and right)
    comparison = expression.comparison
    (left_kind, left_value), (right_kind, right_value) = (
        primitive(operand, inputs) for operand in (comparison.left_value, comparison.right_value)
    )
    if left_kind != right_kind:
        raise MalformedBranch(f"comparison between different primitive types: {left_kind} and {right_kind}")
    if left_kind == "boolean" and comparison.operator in ORDERS:
        raise MalformedBranch("booleans have no order")
    return bool(COMPARE[comparison.operator](left_value, right_value))


def primitive(operand: Operand, inputs: Mapping[str, Literal]) -> tuple[str, Any]:
    """Return the type and the value of an operand."""
    if operand.WhichOneof("val") == "var":
        if operand.var not in inputs:
            raise MalformedBranch(f"no value for {operand.var!r}")
        if inputs[operand.var].scalar.WhichOneof("value") != "primitive":
            raise MalformedBranch(f"{operand.var!r} is not a primitive")
        found: Primitive = inputs[operand.var].scalar.primitive
    else:
        found = operand.primitive
    kind = str(found.WhichOneof("value"))
    return kind, getattr(found, kind)
