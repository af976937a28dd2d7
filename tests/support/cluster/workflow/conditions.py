"""The chosen node of a ``conditional`` (``branch/evaluator.go``, ``branch/comparator.go``)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from flyteidl.core.condition_pb2 import BooleanExpression, ComparisonExpression, ConjunctionExpression, Operand
from flyteidl.core.literals_pb2 import Literal, Primitive
from flyteidl.core.workflow_pb2 import IfElseBlock, Node

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
    """The node of the first condition that holds, else that of ``else``.

    Raises ``MalformedBranch`` if none holds, or for operands that are no primitives of one type.
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
    """Type and value of an operand."""
    if operand.WhichOneof("val") == "var":
        if operand.var not in inputs:
            raise MalformedBranch(f"no value for {operand.var!r}")
        if inputs[operand.var].scalar.WhichOneof("value") != "primitive":
            raise MalformedBranch(f"{operand.var!r} is no primitive")
        found: Primitive = inputs[operand.var].scalar.primitive
    else:
        found = operand.primitive
    kind = str(found.WhichOneof("value"))
    return kind, getattr(found, kind)
