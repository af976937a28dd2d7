"""Torch before the version that the project asks for, as images for GPUs bring it.

What is adapted stands here, and nowhere else: the names that two collectives have had since 2.13. Every name of torch
that the engines use is looked for, and the check "machine" says which are missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.errors import UserError
from tests.support import REPOSITORY

LEAST = (2, 11)
#: Functions of ``torch.distributed`` by what they were called before.
RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def adapt() -> None:
    """Give functions of this process's torch the names that the engines call them by."""
    for name, before in RENAMED.items():
        if not hasattr(dist, name):
            vars(dist)[name] = getattr(dist, before)


def check_torch(version: str = torch.__version__) -> None:
    """Raise ``UserError`` if torch is older than any that was thought of."""
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        raise UserError(f"torch {version} is installed; expected {LEAST[0]}.{LEAST[1]} or newer")


def lacking(folder: Path = REPOSITORY / "slipstream") -> list[str]:
    """What the engines use of torch that this torch does not have."""
    wanted = {name for path in sorted(folder.rglob("*.py")) for name in used_of_torch(ast.parse(path.read_text()))}
    return [f"{module}.{name}" for module, name in sorted(wanted) if not has(module, name)]


def used_of_torch(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of torch, each with a name that is imported from it or looked up in it."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules |= {alias.asname: alias.name} if alias.asname else {"torch": "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield str(node.module), alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node.value)):
            first, _, rest = chain.partition(".")
            if first in modules:
                yield f"{modules[first]}.{rest}".rstrip("."), node.attr


def dotted(node: ast.expr) -> str:
    """``a.b.c``; "" for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def has(module: str, name: str) -> bool:
    """Whether the module has it; true if it is none, but a class or a function."""
    try:
        found = import_module(module)
    except ImportError:
        owner, _, last = module.rpartition(".")
        return bool(owner) and has(owner, last)
    try:
        return hasattr(found, name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False
