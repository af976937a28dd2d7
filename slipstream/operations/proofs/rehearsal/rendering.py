"""Rendering of a task's template for the pods of one attempt, as by propeller."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flyteidl.core.security_pb2 import Secret
from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

from slipstream.operations.proofs.rehearsal.pods import GRACE_S, Toleration

TEMPLATE = re.compile(r"\{\{\s*[.$](\w+)\s*\}\}")
#: Taint of spot nodes, and the toleration that the platform adds to interruptible pods (``interruptible-tolerations``).
SPOT = "example.com/spot"
SPOT_TOLERATION: Toleration = {"key": SPOT, "operator": "Exists", "effect": "NoSchedule"}
#: Label that propeller sets on all pods of a node (``node_exec_context.go``).
INTERRUPTIBLE = "interruptible"
#: Propeller's ``task.IDMaxLength``.
LONGEST_NAME = 50


class PrimaryContainer(NamedTuple):
    """Command and environment of a task's primary container, and the grace period and tolerations of its pods."""

    command: list[str]
    environment: dict[str, str]
    grace_s: float
    tolerations: list[Toleration]


def primary_container(task: TaskTemplate, interruptible: bool = False) -> PrimaryContainer:
    """Return the primary container of a task's pods.

    The platform's tolerations precede those of the template (``flytek8s/k8s_resource_adds.go: GetPodTolerations``).
    """
    tolerations = [SPOT_TOLERATION] if interruptible else []
    if task.HasField("container"):
        container = task.container
        environment = {pair.key: pair.value for pair in container.env}
        return PrimaryContainer([*container.command, *container.args], environment, GRACE_S, tolerations)
    spec = MessageToDict(task.k8s_pod)["podSpec"]
    name = task.config["primary_container_name"]
    (primary,) = [each for each in spec["containers"] if each["name"] == name]
    labels = {INTERRUPTIBLE: str(interruptible).lower()}
    environment = {pair["name"]: pair.get("value", "") or label_of(pair, labels) for pair in primary.get("env", [])}
    command = [*primary.get("command", []), *primary.get("args", [])]
    grace_s = float(spec.get("terminationGracePeriodSeconds", GRACE_S))
    return PrimaryContainer(command, environment, grace_s, [*tolerations, *spec.get("tolerations", [])])


def granted_secrets(task: TaskTemplate, secrets: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return environment and files that Flyte's webhook gives to a task's pods, from secrets by ``GROUP/KEY``.

    Files are named relative to ``/etc/flyte/secrets``. Raises ``AssertionError`` for a secret that is missing, whose
    pod would never start.
    """
    environment, files = dict[str, str](), dict[str, str]()
    for asked in task.security_context.secrets:
        name = f"{asked.group}/{asked.key}"
        assert name in secrets, f"{task.id.name}: the namespace has no secret {name}"
        if asked.mount_requirement == Secret.ENV_VAR:
            environment[asked.env_var or f"_FSEC_{asked.group}_{asked.key}".upper()] = secrets[name]
        else:
            files[name.lower()] = secrets[name]
    return environment, files


def label_of(variable: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return the label that an environment variable takes from its pod; "" for other sources."""
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
    return next((value for name, value in labels.items() if path == f"metadata.labels['{name}']"), "")


def values_of(inputs: str, place: str, raw: str = "", previous: str = "") -> dict[str, str]:
    """Return propeller's values for the templates of a command line.

    ``inputs`` is the address of the inputs, ``place`` the prefix of the attempt, ``raw`` that of its raw output and
    ``previous`` that of the attempt before.
    """
    raw = raw or f"{place}/raw"
    return {
        "input": inputs,
        "outputPrefix": place,
        "rawOutputDataPrefix": raw,
        "checkpointOutputPrefix": f"{raw}/_flytecheckpoints",
        "prevCheckpointPrefix": f"{previous}/_flytecheckpoints" if previous else '""',
    }


def raw_output(base: str, execution: str, node: str, attempt: int) -> str:
    """Return the prefix of an attempt's raw output below ``base``, with a shard drawn from its name.

    As in ``taskexec_context.go: ComputeRawOutputPrefix``. A long name is hashed
    (``encoding.go: FixedLengthUniqueIDForParts``).
    """
    name = f"{execution}-{node.replace('/', '-')}-{attempt}"
    digest = hashlib.sha256(name.encode())
    if len(name) > LONGEST_NAME:
        name = "f" + base64.b32encode(digest.digest())[:7].decode().lower()
    return f"{base}/{digest.hexdigest()[:2]}/{name}"


def rendered(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the command line with propeller's values in its templates, whose names have any case (``template.go``)."""
    lower = {name.lower(): value for name, value in values.items()}
    return [TEMPLATE.sub(lambda match: lower[match[1].lower()], part) for part in command]
