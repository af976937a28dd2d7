"""Kubernetes objects as plain trees, and their YAML files with comments on the reasons."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

#: First line of every file, by which a later call recognises its own files.
MARK = "# Written by slipstream manifests"
#: Width of comments; values are never folded.
WIDTH = 110

Tree = dict[str, Any]


@dataclass(frozen=True)
class KubernetesObject:
    """Kubernetes object, with the reason for its settings as a comment."""

    why: str
    tree: Tree


@dataclass(frozen=True)
class ManifestFile:
    """Output file.

    ``path`` is relative to the output directory, ``purpose`` is printed, and ``why`` is a comment on all objects.
    """

    path: str
    purpose: str
    documents: tuple[KubernetesObject, ...]
    why: str = ""


class ManifestDumper(yaml.SafeDumper):
    """YAML dumper without anchors, with multi-line texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


ManifestDumper.add_representer(str, ManifestDumper.represent_text)


def kubernetes_object(api_version: str, kind: str, name: str, namespace: str = "", **rest: Any) -> Tree:
    """Return a Kubernetes object; ``rest`` are its other fields, omitted where they are None."""
    metadata: Tree = {"name": name, **({"namespace": namespace} if namespace else {})}
    metadata["labels"] = {"app.kubernetes.io/part-of": "slipstream"}
    fields = {key: value for key, value in rest.items() if value is not None}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def yaml_text(tree: Mapping[str, Any]) -> str:
    return yaml.dump(dict(tree), Dumper=ManifestDumper, sort_keys=False, width=math.inf, allow_unicode=True)


def render_file(file: ManifestFile, profile: str) -> str:
    """Return the text of the file; equal objects give equal bytes."""
    parts = [f"{commented(document.why)}{yaml_text(document.tree)}" for document in file.documents]
    head = commented(f"{MARK.removeprefix('# ')} for the profile {profile}: {file.purpose}.")
    return head + commented(file.why) + "#\n" + "---\n".join(parts)


def commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(" ".join(text.split()), WIDTH, break_on_hyphens=False))
