"""A ``kubectl`` for PATH that answers from files, in the shape in which a cluster answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = """#!/bin/sh
shift # --request-timeout
cd "$(dirname "$0")/answers" || exit 1
case "$1 $2" in
  "config current-context") file=context ;;
  "get configmap") file="configmaps/$5/$3.json" ;;
  get*) file="$2.json"; [ "$5" = name ] && file="$2.names" ;;
esac
if [ -f "refused/$2" ]; then echo "Error from server (Forbidden): $2 is forbidden: you cannot $1" >&2; exit 1; fi
if [ -f "$file" ]; then cat "$file"; else echo "error: the server does not answer about $*" >&2; exit 1; fi
"""


#: Kind of training jobs, as kubectl is asked for them.
JOBS = "pytorchjobs.kubeflow.org"


def install(directory: Path, refused: Sequence[str] = (), **lists: list[dict[str, Any]]) -> str:
    """Write the executable and its answers to ``kubectl get``; returns a PATH on which it is the only kubectl.

    What is called ``refused`` the user may not get. ConfigMaps are got one by one, by ``kubectl get configmap NAME
    --namespace NAMESPACE``.
    """
    answers = directory / "answers"
    answers.mkdir(parents=True)
    (answers / "context").write_text("test-cluster\n")
    for kind, items in lists.items():
        (answers / f"{kind}.names").write_text("".join(f"{kind}/{each['metadata']['name']}\n" for each in items))
        (answers / f"{kind}.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    for each in lists.get("configmaps", []):
        file = answers / "configmaps" / each["metadata"]["namespace"] / f"{each['metadata']['name']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(each))
    (answers / "refused").mkdir()
    for kind in refused:
        (answers / "refused" / kind).touch()
    script = directory / "kubectl"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    for tool in ("sh", "cat", "dirname"):
        (directory / tool).symlink_to(Path("/bin") / tool)
    return str(directory)


def definition(
    name: str = "pytorchjobs.kubeflow.org", generator: str = "v0.16.5", policy: tuple[str, ...] = ("managedBy",)
) -> dict[str, Any]:
    run_policy = {"properties": {field: {"type": "string"} for field in policy}}
    schema = {"properties": {"spec": {"properties": {"runPolicy": run_policy}}}}
    return {
        "metadata": {"name": name, "annotations": {"controller-gen.kubebuilder.io/version": generator}},
        "spec": {"versions": [{"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}}]},
    }


def operator(image: str = "kubeflow/training-operator:v1-5170a36", gang: str = "") -> dict[str, Any]:
    """The training operator; ``gang`` is its scheduler that starts all pods of a job or none."""
    container: dict[str, Any] = {"name": "training-operator", "image": image, "command": ["/manager"]}
    if gang:
        container["args"] = [f"--gang-scheduler-name={gang}"]
    return {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def quota(namespace: str, **hard: str) -> dict[str, Any]:
    return {"metadata": {"name": "ours", "namespace": namespace}, "spec": {"hard": hard}}


def node(
    name: str, labels: dict[str, str], taints: tuple[str, ...] = (), cordoned: bool = False, **allocatable: str
) -> dict[str, Any]:
    """A node; ``gpu`` and ``disk`` stand for ``nvidia.com/gpu`` and ``ephemeral-storage``."""
    long = {"gpu": "nvidia.com/gpu", "disk": "ephemeral-storage"}
    spec: dict[str, Any] = {"taints": [{"key": key, "value": "true", "effect": "NoSchedule"} for key in taints]}
    if cordoned:
        spec["unschedulable"] = True
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": spec,
        "status": {"allocatable": {long.get(what, what): amount for what, amount in allocatable.items()}},
    }
