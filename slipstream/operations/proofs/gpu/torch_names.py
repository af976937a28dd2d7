"""Names of torch that the engines use; the check "machine" reports those that the installed torch lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from slipstream.shared.artifacts.versions import ROOT

#: Module that looks for names before it uses them.
DIFFERENCES = ROOT / "slipstream/shared/machine/torch_versions.py"


def missing_names(folder: Path = ROOT / "slipstream") -> list[str]:
    """Return the names that the engines use and this torch lacks."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path != DIFFERENCES]
    wanted = {name for path in paths for name in used_of_torch(ast.parse(path.read_text(encoding="utf-8")))}
    return [f"{module}.{name}" for module, name in sorted(wanted) if not has(module, name)]


def used_of_torch(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield modules of torch with the names that are imported from them or looked up in them."""
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
    """Return ``a.b.c``, or "" for any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def has(module: str, name: str) -> bool:
    """Return True if the module has the name, or if ``module`` names a class or a function."""
    try:
        found = import_module(module)
    except ImportError:
        owner, _, last = module.rpartition(".")
        return bool(owner) and has(owner, last)
    try:
        return hasattr(found, name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False
