"""Queries of ``kubectl`` for the cluster of its current context."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

TIMEOUT_S = 30

#: Kubernetes object as JSON.
KubeObject = Mapping[str, Any]
#: Function that runs kubectl and returns its JSON output. Raises ``KubectlError`` if that fails.
Ask = Callable[..., Any]


class KubectlError(RuntimeError):
    """Error for a failed kubectl call; the message says why."""


def kubectl(*arguments: str) -> Any:
    try:
        ended = subprocess.run(
            ["kubectl", "--request-timeout=10s", *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KubectlError(f"kubectl {' '.join(arguments)}: {error}") from None
    if ended.returncode:
        message = " ".join((ended.stderr or ended.stdout).split())
        raise KubectlError(f"kubectl {' '.join(arguments)}: {message or f'exit code {ended.returncode}'}")
    if arguments[-1] != "json":
        return ended.stdout.strip()
    try:
        return json.loads(ended.stdout)
    except ValueError:
        raise KubectlError(f"kubectl {' '.join(arguments)}: its answer is not JSON") from None


def list_objects(ask: Ask, *arguments: str) -> list[KubeObject]:
    answer = ask("get", *arguments, "--output", "json")
    return answer.get("items", []) if isinstance(answer, dict) else []


def list_names(ask: Ask, kind: str) -> set[str]:
    """Return the names of all objects of a kind, without their contents, such as the values of secrets."""
    return {line.rpartition("/")[2] for line in str(ask("get", kind, "--all-namespaces", "--output", "name")).split()}
