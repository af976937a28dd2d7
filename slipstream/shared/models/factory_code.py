"""Modules on which a user's model factory depends, found without running any of them.

They are the factory's module and all direct and indirect imports, also inside functions, with the ``__init__`` of their
packages. Installed packages count by version, and only if the user's own modules import them; Python and this project
are versioned elsewhere. Dependencies without an import stay unknown: data files, and modules with computed names.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import resolve_name
from pathlib import Path

import xxhash

from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.syntax import Syntax, kept_syntaxes
from slipstream.shared.models.config import ModelConfig

#: Directory names that mark installed packages; the standard library's directories are looked up.
LIBRARIES = ("site-packages", "dist-packages")
PROJECT = __name__.partition(".")[0]


def fingerprint_model(config: ModelConfig) -> str:
    """Return the XXH3-128 digest of the factory's code; "" for built-in models, or without such a module."""
    code = model_code(config)
    return xxhash.xxh3_128_hexdigest(canonical_json(code)) if code else ""


def model_code(config: ModelConfig) -> dict[str, str]:
    """Return digests of the factory's own modules, and versions of the packages that they import, by name.

    Empty for built-in models, or if the module does not exist. A Python module counts by its syntax tree, without
    comments and docstrings, other modules by their bytes.
    """
    if not config.factory:
        return {}
    import_from_working_directory()
    importlib.invalidate_caches()
    found: dict[str, UserModule] = {}
    packages: set[str] = set()
    waiting = [config.factory.partition(":")[0]]
    while waiting:
        name = waiting.pop()
        modules = list(own_modules(name))
        if not modules:
            packages.add(name.partition(".")[0])
        for module in modules:
            if module.name not in found:
                found[module.name] = module
                waiting += module.imported_names()
    digests = {name: module.digest for name, module in found.items() if module.file}
    # A factory outside the user's modules belongs to an installed package, or does not exist.
    others = packages - {PROJECT} - sys.stdlib_module_names
    return digests | {name: versions for name in others if (versions := versions_of(name))}


@dataclass(frozen=True)
class UserModule:
    """User's own module. Without a file it is a namespace package, which has no code."""

    name: str
    file: Path | None
    #: Package relative to which its relative imports are resolved.
    package: str

    @property
    def digest(self) -> str:
        syntax = self.syntax
        assert self.file
        return syntax.digest[:32] if syntax else xxhash.xxh3_128_hexdigest(self.file.read_bytes())

    @property
    def syntax(self) -> Syntax | None:
        """Syntax tree of the source; None without source, or if it is invalid."""
        if self.file is None or self.file.suffix not in SOURCE_SUFFIXES:
            return None
        try:
            return kept_syntaxes().of(self.file.read_bytes())
        except (SyntaxError, ValueError):
            return None

    def imported_names(self) -> Iterator[str]:
        """Yield every dotted name that the source imports, also ``package.name`` of ``from package import name``."""
        for name in self.syntax.imports if self.syntax else ():
            if not name.startswith("."):
                yield name
                continue
            try:
                yield resolve_name(name, self.package)
            except ImportError:  # beyond the outermost package
                continue


def own_modules(name: str) -> Iterator[UserModule]:
    """Yield the user's own modules that run if ``name`` is imported, outer packages first.

    Stops at the first part of the dotted name that is not a module.
    """
    places: Iterable[str] | None = None
    parts = name.split(".")
    for end, part in enumerate(parts, start=1):
        spec = outermost(part) if places is None else PathFinder.find_spec(part, list(places))
        if spec is None or (places is None and not is_own(spec)):
            return
        inside = spec.submodule_search_locations
        file = Path(spec.origin) if spec.has_location and spec.origin else None
        this, parent = ".".join(parts[:end]), ".".join(parts[: end - 1])
        yield UserModule(this, file, parent if inside is None else this)
        if inside is None:
            return
        places = list(inside)


def outermost(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module; None if there is none.

    Asks all finders. Submodules are looked up by ``PathFinder`` only, because others search the imported packages.
    """
    finders = (find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)))
    return next((spec for find in finders if (spec := find(name, None))), None)


def is_own(spec: ModuleSpec) -> bool:
    """Return True if a top-level module is the user's own.

    It is neither built in, nor this project's, nor in the standard library, nor an installed package.
    """
    files = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations or []
    if not files or spec.name == PROJECT:
        return False
    if not all(is_library(Path(file)) for file in files):
        return True
    return spec.name not in sys.stdlib_module_names and not versions_of(spec.name)


def is_library(file: Path) -> bool:
    paths = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not set(LIBRARIES).isdisjoint(file.parts) or any(file.is_relative_to(path) for path in paths)


def versions_of(package: str) -> str:
    """Return the version of the installed package that provides a top-level module; "" if there is none.

    If several packages provide it, names and versions of all are joined.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return " ".join(f"{name} {version(name)}" for name in sorted(set(installed_distributions().get(package, ()))))


@cache
def installed_distributions() -> dict[str, list[str]]:
    """Return the installed packages of every top-level module, cached because reading them takes half a second."""
    return dict(packages_distributions())


def import_from_working_directory() -> None:
    """Put the working directory on the import path, as ``python -m`` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
