"""Kubernetes objects as plain trees, and the files that hold them: YAML with a comment that says why."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

#: The first line of every file, by which a later call knows its own.
MARK = "# Written by slipstream manifests"
#: Of the comments; values are never folded.
WIDTH = 110

Tree = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """One object, and why it is as it is."""

    why: str
    tree: Tree


@dataclass(frozen=True)
class File:
    """``path`` is relative to the output, ``purpose`` what is printed of it; ``why`` holds for all of its objects."""

    path: str
    purpose: str
    documents: tuple[Document, ...]
    why: str = ""


class Dumper(yaml.SafeDumper):
    """No anchors, which nobody reads, and texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


Dumper.add_representer(str, Dumper.represent_text)


def kube(api_version: str, kind: str, name: str, namespace: str = "", **rest: Any) -> Tree:
    """An object; ``rest`` are its fields beside the metadata, those that are None left out."""
    metadata: Tree = {"name": name, **({"namespace": namespace} if namespace else {})}
    metadata["labels"] = {"app.kubernetes.io/part-of": "slipstream"}
    fields = {key: value for key, value in rest.items() if value is not None}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def text_of(tree: Mapping[str, Any]) -> str:
    return yaml.dump(dict(tree), Dumper=Dumper, sort_keys=False, width=math.inf, allow_unicode=True)


def rendered(file: File, profile: str) -> str:
    """The text of the file: the same bytes for the same trees."""
    parts = [f"{commented(document.why)}{text_of(document.tree)}" for document in file.documents]
    head = commented(f"{MARK.removeprefix('# ')} for the profile {profile}: {file.purpose}.")
    return head + commented(file.why) + "#\n" + "---\n".join(parts)


def commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(" ".join(text.split()), WIDTH, break_on_hyphens=False))
