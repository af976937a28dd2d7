"""Names of torch that the engines use; the check "machine" reports those that the installed torch lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.support import REPOSITORY

#: The module that looks for names before it uses them.
DIFFERENCES = REPOSITORY / "slipstream/machine/torch_versions.py"


def lacking(folder: Path = REPOSITORY / "slipstream") -> list[str]:
    """What the engines use of torch that this torch does not have."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path != DIFFERENCES]
    wanted = {name for path in paths for name in used_of_torch(ast.parse(path.read_text()))}
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
