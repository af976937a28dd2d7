"""Rendering of a task's template for the pods of one attempt, as by propeller."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

from tests.support.cluster.pods import GRACE_S, Toleration

TEMPLATE = re.compile(r"\{\{\s*[.$](\w+)\s*\}\}")


#: The taint of spot nodes, and what the platform lets its interruptible pods tolerate (``interruptible-tolerations``).
SPOT = "example.com/spot"
SPOT_TOLERATION: Toleration = {"key": SPOT, "operator": "Exists", "effect": "NoSchedule"}


class Container(NamedTuple):
    """What the primary container of a task's pods runs, and the nodes that the pods tolerate."""

    command: list[str]
    environment: dict[str, str]
    grace_s: float
    tolerations: list[Toleration]


def primary_container(task: TaskTemplate, interruptible: bool = False) -> Container:
    """``flytek8s/k8s_resource_adds.go: GetPodTolerations``: those of the platform come before the template's own."""
    tolerations = [SPOT_TOLERATION] if interruptible else []
    if task.HasField("container"):
        container = task.container
        environment = {pair.key: pair.value for pair in container.env}
        return Container([*container.command, *container.args], environment, GRACE_S, tolerations)
    spec = MessageToDict(task.k8s_pod)["podSpec"]
    name = task.config["primary_container_name"]
    (primary,) = [each for each in spec["containers"] if each["name"] == name]
    environment = {pair["name"]: pair.get("value", "") for pair in primary.get("env", [])}
    command = [*primary.get("command", []), *primary.get("args", [])]
    grace_s = float(spec.get("terminationGracePeriodSeconds", GRACE_S))
    return Container(command, environment, grace_s, [*tolerations, *spec.get("tolerations", [])])


def values_of(inputs: str, place: str, raw: str = "", previous: str = "") -> dict[str, str]:
    """Propeller's values for the templates of a command line: the address of the inputs, and the prefixes of an attempt
    that has ``place`` to itself; ``raw`` is that of its raw output, ``previous`` that of the attempt before, if there
    was one."""
    raw = raw or f"{place}/raw"
    return {
        "input": inputs,
        "outputPrefix": f"{place}/outputs",
        "rawOutputDataPrefix": raw,
        "checkpointOutputPrefix": f"{raw}/_flytecheckpoints",
        "prevCheckpointPrefix": f"{previous}/_flytecheckpoints" if previous else '""',
    }


def raw_output(base: str, execution: str, node: str, attempt: int) -> str:
    """Return the prefix of an attempt's raw output below ``base``, with an unpredictable shard of its own
    (``taskexec_context.go: ComputeRawOutputPrefix``)."""
    name = f"{execution}-{node.replace('/', '-')}-{attempt}"
    shard = hashlib.sha256(name.encode()).hexdigest()[:2]
    return f"{base}/{shard}/{name}"


def rendered(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command line with propeller's values in its templates (``template.go``; names in any case, none unknown)."""
    lower = {name.lower(): value for name, value in values.items()}
    return [TEMPLATE.sub(lambda match: lower[match[1].lower()], part) for part in command]
