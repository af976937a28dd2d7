"""Manifests: the Kubernetes objects in a directory's YAML files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.shared.errors import UserError

#: API groups of the checked kinds, as other groups use the same kind names.
GROUPS = {
    "ClusterQueue": "kueue.x-k8s.io",
    "NodePool": "karpenter.sh",
    "Queue": "scheduling.volcano.sh",
    "ResourceFlavor": "kueue.x-k8s.io",
    "ScaledObject": "keda.sh",
}


@dataclass(frozen=True, eq=False)
class KubernetesManifest:
    """Kubernetes object with the path of its file in the directory."""

    file: str
    tree: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Kind; with the API group if that is not the expected one."""
        kind, group = str(self.tree["kind"]), str(self.tree.get("apiVersion")).partition("/")[0]
        return kind if GROUPS.get(kind, group) == group else f"{kind} of {group}"

    @property
    def where(self) -> str:
        return f"{self.file}: {self.kind} {self.at('metadata', 'name') or '?'}"

    def at(self, *path: str) -> Any:
        """Return the value at a path of keys; None if missing."""
        found: Any = self.tree
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def mapping(self, *path: str) -> Mapping[str, Any]:
        found = self.at(*path)
        return found if isinstance(found, Mapping) else {}

    def listed(self, *path: str) -> list[Mapping[str, Any]]:
        """Return the mappings in the list at a path."""
        return mappings_in(self.at(*path))


def mappings_in(found: object) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def read_manifests(directory: Path) -> list[KubernetesManifest]:
    """Return all objects below a directory.

    Raises ``UserError`` if there are none, or a file is not YAML.
    """
    paths = sorted(path for path in directory.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    found = [manifest for path in paths for manifest in read_file(path, path.relative_to(directory).as_posix())]
    if not found:
        raise UserError(f"{directory}: no manifests; expected a directory such as `slipstream manifests` writes")
    return found


def read_file(path: Path, name: str) -> Iterator[KubernetesManifest]:
    """Yield the objects of a file; documents without a kind, such as a chart's values, are skipped."""
    try:
        trees = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for tree in trees:
        if isinstance(tree, dict) and tree.get("kind") == "List":
            yield from (KubernetesManifest(name, each) for each in tree.get("items") or [] if has_kind(each))
        elif has_kind(tree):
            yield KubernetesManifest(name, tree)


def has_kind(tree: object) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("kind"), str)
