"""Torch before the version that the project asks for, as images for GPUs bring it.

What would have to be adapted stands here, and nowhere else. From 2.11 on that is nothing: every name that the engines
import is looked for, and the check "machine" says which are missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

from slipstream.errors import UserError
from tests.support import REPOSITORY

LEAST = (2, 11)


def check_torch(version: str = torch.__version__) -> None:
    """Raise ``UserError`` if torch is older than any that was thought of."""
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        raise UserError(f"torch {version} is installed; expected {LEAST[0]}.{LEAST[1]} or newer")


def lacking(folder: Path = REPOSITORY / "slipstream") -> list[str]:
    """What the engines import of torch that this torch does not have."""
    wanted = {name for path in sorted(folder.rglob("*.py")) for name in imported_from_torch(path)}
    return [f"{module}.{name}" for module, name in sorted(wanted) if not has(module, name)]


def imported_from_torch(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.module or "", alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False
