"""The modules of the project, their imports, also by string, and the imports between packages."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from slipstream.shared.artifacts.versions import ROOT, cached_syntax

FLOORS = ("workflows", "tasks", "slipstream")
#: Folders of ``slipstream/`` that only hold packages: stages, operations, and what they share.
GROUPS = ("operations", "pipeline", "shared")
#: A module, or something in it, in a string: ``package.module`` or ``package.module:function``.
NAME = re.compile(r"([a-z_]\w*(?:\.\w+)+)(?::\w+)?")
#: Modules whose strings name others to read their sources, not to import them.
READERS = ("slipstream.shared.stages", "slipstream.shared.artifacts.versions")


def module_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Return the modules of the project that a file imports; ``from package import name`` may name one."""
    names = [(name, name.rpartition(".")[0]) for name in cached_syntax(path).imports]
    return {next(name for name in either if name in MODULES) for either in names if MODULES.keys() & set(either)}


IMPORTS = {module: imports_of(path) - {module} for module, path in MODULES.items()}


def names_in_strings(path: Path) -> set[str]:
    """Return the dotted names that are whole strings of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {found[1] for text in texts if (found := NAME.fullmatch(text))}


def loaded_by_string(module: str) -> set[str]:
    """Return the modules of the project that a module can import by their names in strings."""
    return set() if module in READERS else names_in_strings(MODULES[module]) & MODULES.keys() - {module}


def folder_of(module: str) -> str:
    """Return ``workflows``, ``tasks`` or the package of ``slipstream/``; "" for a module outside of packages."""
    first, *rest = MODULES[module].relative_to(ROOT).parts
    inside = rest[1:] if rest[0] in GROUPS else rest
    return first if first != "slipstream" else inside[0] if len(inside) > 1 else ""


def group_of(package: str) -> str:
    """Return the group whose folder holds a package of ``slipstream/``; the package itself outside of groups."""
    return next((group for group in GROUPS if (ROOT / "slipstream" / group / package).is_dir()), package)


def imports_between_folders() -> dict[str, set[str]]:
    """Return the folders that every folder imports from, itself excluded."""
    found: dict[str, set[str]] = {folder_of(module): set() for module in MODULES}
    for module, imports in IMPORTS.items():
        found[folder_of(module)] |= {folder_of(name) for name in imports} - {folder_of(module)}
    del found[""]
    return {folder: imports - {""} for folder, imports in found.items()}


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return all nodes below ``start``. Raise ``ValueError`` on a cycle through it."""
    below: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node == start:
            raise ValueError(f"{start} imports itself through {', '.join(sorted(below))}")
        if node not in below:
            below.add(node)
            waiting.extend(graph[node])
    return below


def without_implied(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the edges that follow from two or more others (its transitive reduction)."""
    below = {node: reachable(graph, node) for node in graph}
    return {node: {to for to in ends if not any(to in below[other] for other in ends)} for node, ends in graph.items()}
