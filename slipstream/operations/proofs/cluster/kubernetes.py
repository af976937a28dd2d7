"""Pods of a training on the user's cluster, and three ways to lose a pod."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from slipstream.operations.doctor.kubectl import Ask, KubectlError, KubeObject, kubectl, list_objects
from slipstream.shared.errors import UserError

How = Literal["deleted", "evicted", "killed"]
#: Rights that the proof needs: a verb, and a subresource of pods.
RIGHTS = (("list", ""), ("get", "log"), ("delete", ""), ("create", "eviction"), ("create", "exec"))
#: Kills all processes but the first, which no process of its container can kill; it ends with its child.
KILL = ("sh", "-c", "kill -9 -1")


@dataclass(frozen=True)
class Kubernetes:
    """Namespace of the cluster of kubectl's context."""

    namespace: str
    ask: Ask = kubectl

    def context(self) -> str:
        """Return the name of the cluster. Raises ``UserError`` if there is none or rights are missing."""
        try:
            context = str(self.ask("config", "current-context"))
        except KubectlError as error:
            raise UserError(f"no cluster: {error}") from None
        missing = [f"{verb} pods/{what}".rstrip("/") for verb, what in RIGHTS if not self.may(verb, what)]
        if missing:
            raise UserError(
                f"cluster {context}: you may not {', '.join(missing)} in namespace {self.namespace}; "
                "ask its administrator, or name another by --namespace"
            )
        return context

    def may(self, verb: str, subresource: str) -> bool:
        more = [f"--subresource={subresource}"] if subresource else []
        try:
            return self.ask("auth", "can-i", verb, "pods", *more, "--namespace", self.namespace) == "yes"
        except KubectlError:  # "no" is exit code 1
            return False

    def pods(self, execution: str, task: str) -> list[KubeObject]:
        """Return the pods of a task by name, including those that have ended."""
        labels = f"execution-id={execution},task-name={task.replace('.', '-')}"
        found = list_objects(self.ask, "pods", "--namespace", self.namespace, "--selector", labels)
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def log(self, pod: KubeObject) -> str:
        """Return the output of a pod; empty if the pod is gone."""
        name = pod["metadata"]["name"]
        try:
            return str(self.ask("logs", name, "--namespace", self.namespace, "--container", container(pod)))
        except KubectlError:
            return ""

    def lose(self, pod: KubeObject, how: How) -> None:
        name, where = pod["metadata"]["name"], ("--namespace", self.namespace)
        if how == "deleted":
            self.ask("delete", "pod", name, *where, "--wait=false")
        elif how == "evicted":
            kind = {"apiVersion": "policy/v1", "kind": "Eviction"}
            eviction = {**kind, "metadata": {"name": name, "namespace": self.namespace}}
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
                json.dump(eviction, file)
                file.flush()
                path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
                self.ask("create", "--raw", path, "--filename", file.name)
        else:
            with suppress(KubectlError):  # the shell may die with its container before kubectl has heard of it
                self.ask("exec", name, *where, "--container", container(pod), "--", *KILL)

    def drop(self, execution: str) -> None:
        """Delete an execution without Flyte: propeller then removes its pods."""
        self.ask("delete", "flyteworkflow", execution, "--namespace", self.namespace, "--wait=false")


def runs(pod: KubeObject) -> bool:
    """Return True if the pod runs and is not being deleted."""
    return pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def container(pod: KubeObject) -> str:
    """Return the name of the primary container, which Flyte and the training operator put first."""
    return str(pod["spec"]["containers"][0]["name"])
