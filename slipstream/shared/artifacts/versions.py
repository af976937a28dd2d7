"""Versions of a stage's code and libraries, part of Flyte's cache version and of the local store's key.

A stage's code is the import closure of its engine: its modules and all that they import from this project, directly or
indirectly, also inside functions. Sources are read, not imported. A module counts by the digest of its syntax tree
(:mod:`slipstream.shared.artifacts.syntax`), so comments, docstrings and formatting do not change versions. Data files
that a module reads count by their bytes.

The closure ends at the modules of :data:`SEAMS`, which do not affect results.

Of a library only its release counts: ``2.13.0+cu130`` and ``2.13.0a0+x`` are 2.13.0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slipstream.shared.artifacts.syntax import Syntax, data_files, kept_syntaxes
from slipstream.shared.stages import STAGES

ROOT = Path(__file__).parents[3]
PROJECT = "slipstream"
#: Modules or packages at which a closure ends, with version numbers. Increase the number if a bug in one may have
#: changed results: every stage that imports it then gets a new code version.
SEAMS = {
    "slipstream.shared.logs": 1,
    "slipstream.shared.formatting": 1,
    "slipstream.shared.storage.s3": 1,
    "slipstream.shared.storage.object_store": 1,
    "slipstream.shared.storage.gcs": 1,
    "slipstream.shared.storage.azure": 1,
    "slipstream.shared.telemetry": 1,
    "slipstream.pipeline.train.telemetry.totals": 1,
    "slipstream.pipeline.train.telemetry.pods": 1,
}


#: Other distributions of the same library. The first of all that is installed or pinned counts.
BUILDS = {"onnxruntime": ("onnxruntime-gpu",)}
ABSENT = "absent"


@cache
def code_version(stage: str) -> str:
    """Return the digest (hex) of a stage's import closure and installed libraries."""
    return closure_version(STAGES[stage].engines, STAGES[stage].libraries)


def closure_version(modules: tuple[str, ...], libraries: tuple[str, ...]) -> str:
    """Return the digest (hex) of the import closure of ``modules`` and the installed ``libraries``."""
    return version_of(closure_digest(modules), installed_releases(libraries))


def version_of(code: str, releases: Mapping[str, str]) -> str:
    """Return the digest (hex) of the digest ``code`` and the releases of libraries."""
    lines = [code, *(f"{library}=={release}" for library, release in sorted(releases.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def closure_digest(modules: tuple[str, ...]) -> str:
    """Return the digest (hex) of the import closure of ``modules``."""
    digest = hashlib.sha256()
    for module, meaning in module_digests(modules).items():
        digest.update(f"{module}\0{meaning}\0".encode())
    return digest.hexdigest()[:16]


def installed_releases(libraries: Iterable[str]) -> dict[str, str]:
    return {name: first_release(map(installed_version, builds_of(name))) for name in libraries}


def installed_constraints() -> str:
    """Return the installed releases of all stages' libraries, in the form of pip's constraints."""
    releases = installed_releases(sorted({library for stage in STAGES.values() for library in stage.libraries}))
    return "".join(f"{library}=={release}\n" for library, release in releases.items() if release != ABSENT)


def pinned_releases(libraries: Iterable[str], constraints: str) -> dict[str, str]:
    """Return the release of every library in the text of a constraints file, or "absent"."""
    lines = (line.partition("#")[0].partition(";")[0].partition("==") for line in constraints.splitlines())
    pinned = {distribution_name(name): number.strip() for name, _, number in lines if number}
    return {name: first_release(pinned.get(build, ABSENT) for build in builds_of(name)) for name in libraries}


def builds_of(library: str) -> tuple[str, ...]:
    return (library, *BUILDS.get(library, ()))


def first_release(numbers: Iterable[str]) -> str:
    number = next((number for number in numbers if number != ABSENT), ABSENT)
    found = re.match(r"\d+(?:\.\d+)*", number)
    return found[0] if found else number


def distribution_name(text: str) -> str:
    """Return the normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text.strip()).lower()


def module_digests(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of the modules that ``modules`` import, sorted by name; "seam <number>" for ``SEAMS``."""
    digests = {}
    for module, path in sorted(import_closure(modules).items()):
        digests[module] = f"seam {SEAMS[module]}" if module in SEAMS else module_digest(path)
    kept_syntaxes().keep()
    return digests


@cache
def module_digest(path: Path) -> str:
    """Return the digest (hex) of a source file's syntax tree and its data files' bytes."""
    syntax = cached_syntax(path)
    files = data_files(path, syntax)
    if not files:
        return syntax.digest[:32]
    digest = hashlib.sha256(syntax.digest.encode())
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def import_closure(engines: tuple[str, ...]) -> dict[str, Path]:
    """Return the project's modules that ``engines`` import, and ``engines``, with their source files.

    Packages of imported modules are included, because Python runs their ``__init__``. An entry of ``SEAMS`` replaces
    the modules below it. Raises ``ValueError`` for an engine that does not exist.
    """
    sources: dict[str, Path] = {}
    waiting = list(engines)
    while waiting:
        module = waiting.pop()
        module = enclosing_seam(module) or module
        path = module_source_path(module)
        if path is None:
            raise ValueError(f"{module}: no such module below {ROOT}")
        if module in sources:
            continue
        sources[module] = path
        waiting += [package for package in packages_of(module) if package not in sources]
        if module not in SEAMS:
            waiting += [name for name in project_imports(path) if name not in sources]
    return sources


def enclosing_seam(module: str) -> str | None:
    """Return the entry of ``SEAMS`` that equals or contains ``module``, or None."""
    return next((name for name in (*packages_of(module), module) if name in SEAMS), None)


def packages_of(module: str) -> Iterator[str]:
    parts = module.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def project_imports(path: Path) -> Iterator[str]:
    """Yield the modules of this project that a source file imports, also by ``from package import name``."""
    for imported in cached_syntax(path).imports:
        if imported.split(".")[0] != PROJECT:
            continue
        if module_source_path(imported) is not None:
            yield imported
        elif module_source_path(imported.rpartition(".")[0]) is not None:
            yield imported.rpartition(".")[0]


@cache
def cached_syntax(path: Path) -> Syntax:
    return kept_syntaxes().of(path.read_bytes())


@cache
def module_source_path(module: str) -> Path | None:
    """Return the source file of a dotted module name of this project, or None if there is none."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def installed_version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ABSENT
