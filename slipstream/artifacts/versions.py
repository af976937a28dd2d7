"""The code version of a stage, which is part of Flyte's cache version and of the local store's key.

A stage's code is the import closure of its engine: the engine's modules and all modules of this project that they
import, directly or indirectly, at the top of a file or inside a function. It is found by reading the sources, without
importing them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slipstream.stages import STAGES

ROOT = Path(__file__).parents[2]
PROJECT = "slipstream"
#: By a pattern, because parsing all sources takes 30 times as long, half a second at the start of every command and
#: pod; a test compares it with Python's parser.
IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE)
COMMENT = re.compile("#.*")


@cache
def code_version(stage: str) -> str:
    """A digest (hex) of the source files in the stage's import closure and of its libraries' versions."""
    return version_of(STAGES[stage].engines, STAGES[stage].libraries)


def version_of(modules: tuple[str, ...], libraries: tuple[str, ...]) -> str:
    """A digest (hex) of the source files in the import closure of ``modules`` and of the versions of ``libraries``."""
    digest = hashlib.sha256()
    for module, path in sorted(import_closure(modules).items()):
        digest.update(f"{module}\0".encode())
        digest.update(path.read_bytes())
    for library in libraries:
        digest.update(f"{library}=={installed(library)}\0".encode())
    return digest.hexdigest()[:16]


def import_closure(engines: tuple[str, ...]) -> dict[str, Path]:
    """All modules of this project that ``engines`` import, themselves included, with their source files.

    Importing a module runs its packages' ``__init__`` too, so these count. Raises ``ValueError`` for an engine that
    does not exist.
    """
    sources: dict[str, Path] = {}
    waiting = list(engines)
    while waiting:
        module = waiting.pop()
        path = source_of(module)
        if path is None:
            raise ValueError(f"{module}: no such module below {ROOT}")
        if module in sources:
            continue
        sources[module] = path
        waiting += [package for package in packages_of(module) if package not in sources]
        waiting += [name for name in project_imports(path) if name not in sources]
    return sources


def packages_of(module: str) -> Iterator[str]:
    """The packages that contain a module."""
    parts = module.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def project_imports(path: Path) -> Iterator[str]:
    """The modules of this project that a source file imports; ``from package import name`` may name a module, too."""
    for imported in imported_names(path):
        if imported.split(".")[0] != PROJECT:
            continue
        if source_of(imported) is not None:
            yield imported
        elif source_of(imported.rpartition(".")[0]) is not None:
            yield imported.rpartition(".")[0]


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Every dotted name that a source file imports. In this project imports are not relative, and no two statements
    share a line."""
    names: list[str] = []
    for package, members, modules in IMPORT.findall(path.read_text(encoding="utf-8")):
        listed = COMMENT.sub("", members or modules).strip("()").split(",")
        imported = [name.partition(" as ")[0].strip() for name in listed]
        names += [f"{package}.{name}" if package else name for name in imported if name]
    return tuple(names)


@cache
def source_of(module: str) -> Path | None:
    """The source file of a dotted name of this project; ``None`` if it names no module."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def installed(library: str) -> str:
    """The version of an installed library, or "absent"."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"
