"""Dependencies of a node, and the required successes of a map task (``array/handler.go``)."""

from __future__ import annotations

import math

from flyteidl.core.literals_pb2 import BindingData
from flyteidl.core.workflow_pb2 import ArrayNode, Node

from tests.support.cluster.workflow.bindings import START


def needed(array: ArrayNode, size: int) -> int:
    """How many of ``size`` elements have to succeed."""
    if array.WhichOneof("success_criteria") == "min_successes":
        return array.min_successes
    return math.ceil(array.min_success_ratio * size) if array.HasField("min_success_ratio") else size


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
