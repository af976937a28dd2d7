"""Inputs that reach into a structure, as in ``config.data`` of a dataclass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.doctor.archive import Package, nodes_of
from slipstream.doctor.findings import Finding

MEND = "let an uncached task hand the part on as an output of its own, with a HashMethod over its values"


def attribute_paths(package: Package) -> Iterator[Finding]:
    """Inputs and outputs that are bound to a part of a structure.

    Flyte unpacks the structure and packs the part anew, in random order of its keys (flyte#6517), so that its bytes,
    and with them the key of everything cached on them, differ in each execution.
    """
    for name, workflow in package.workflows.items():
        for identity, node in nodes_of(workflow):
            for binding in node.inputs:
                for promise in promises(binding.binding):
                    if reaches_in(package, workflow, promise):
                        yield about(package, f"{name}/{identity}", binding.var, promise, node)
        for binding in workflow.outputs:
            for promise in promises(binding.binding):
                if reaches_in(package, workflow, promise):
                    yield about(package, f"{name}, its outputs", binding.var, promise, None)


def about(package: Package, where: str, variable: str, promise: Any, node: Any) -> Finding:
    what = f"{variable} is bound to {written(promise)}"
    task = package.tasks.get(node.task_node.reference_id.name) if node is not None else None
    if task is not None and task.metadata.discoverable:
        return Finding("error", where, what, "its cache never hits, so that it computes again in each execution", MEND)
    if node is not None and task is None:
        return Finding("error", where, what, "nothing that is cached on it inside ever hits", MEND)
    return Finding("warning", where, what, "nothing that is cached on what comes of it ever hits", MEND)


def promises(data: Any) -> Iterator[Any]:
    """All promises in a binding, also those in lists and maps."""
    if data.HasField("promise"):
        yield data.promise
    for inner in (*data.collection.bindings, *data.map.bindings.values()):
        yield from promises(inner)


def written(promise: Any) -> str:
    """``n0.config.data[2]``"""
    steps = [
        f".{step.string_value}" if step.WhichOneof("value") == "string_value" else f"[{step.int_value}]"
        for step in promise.attr_path
    ]
    source = f"{promise.node_id}." if promise.node_id else "the input "
    return f"{source}{promise.var}{''.join(steps)}"


def reaches_in(package: Package, workflow: Any, promise: Any) -> bool:
    """Whether the path enters a structure; an element of a list or a map is a literal of its own, with its own hash."""
    kind = type_of(package, workflow, promise)
    for step in promise.attr_path:
        shape = kind.WhichOneof("type") if kind is not None else None
        if shape == "collection_type":
            kind = kind.collection_type
        elif shape == "map_value_type":
            kind = kind.map_value_type
        elif shape is None and step.WhichOneof("value") == "int_value":
            kind = None
        else:
            return True
    return False


def type_of(package: Package, workflow: Any, promise: Any) -> Any:
    """The type of what is promised; ``None`` if its source is not in the package, or is an array node."""
    if promise.node_id in ("", "start-node"):
        variables = workflow.interface.inputs.variables
    else:
        source = next((node for node in workflow.nodes if node.id == promise.node_id), None)
        variables = outputs_of(package, source)
    return variables[promise.var].type if promise.var in variables else None


def outputs_of(package: Package, node: Any) -> Any:
    if node is None or node.HasField("array_node"):
        return {}
    if node.HasField("branch_node"):
        return outputs_of(package, node.branch_node.if_else.case.then_node)
    if node.HasField("task_node"):
        source = package.tasks.get(node.task_node.reference_id.name)
    else:
        plan = package.launch_plans.get(node.workflow_node.launchplan_ref.name)
        source = package.workflows.get(plan.workflow_id.name if plan else node.workflow_node.sub_workflow_ref.name)
    return source.interface.outputs.variables if source is not None else {}
