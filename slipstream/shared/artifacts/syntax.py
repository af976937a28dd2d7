"""Digest of a Python source's syntax tree, with its imports and the data files that it reads.

The digest ignores docstrings, comments, formatting and texts of log messages. It is equal on Python 3.11 to 3.14,
because parts of the tree that later versions add or store differently are skipped.

Parsing all sources takes about a second, so results are kept in the user's cache directory by the SHA-256 of the
source. The cache file starts with a checksum and is ignored if damaged.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Version of the digest's definition; increase it when :func:`write_tree` changes, to discard cached results.
FORM = 2
#: Largest number of cache entries, several times the number of sources; a fuller cache is emptied.
MOST_KEPT = 5000
#: Fields of syntax trees that do not affect execution or that some Python versions lack.
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
DATA_SUFFIXES = (".toml", ".html", ".css", ".js", ".json", ".jinja", ".txt", ".yaml")


@dataclass(frozen=True)
class Syntax:
    """Analysis of one source file."""

    #: SHA-256 (hex) of the canonical syntax tree.
    digest: str
    #: Imported dotted names; ``from package import name`` gives ``package.name``. Relative imports keep their dots.
    imports: tuple[str, ...]
    #: Relative paths in the source that may be data files or directories next to it.
    data: tuple[str, ...]


class Syntaxes:
    """Cache of :class:`Syntax` by source content, persisted in ``file``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._kept = read_kept(file)
        self._added: dict[str, Syntax] = {}

    def of(self, source: bytes) -> Syntax:
        """Return the analysis of a source. Raises ``SyntaxError`` or ``ValueError`` if it is not Python."""
        key = hashlib.sha256(source).hexdigest()
        found = self._kept.get(key) or self._added.get(key)
        if found is None:
            found = self._added[key] = analyse_source(source)
        return found

    def keep(self) -> None:
        """Write new results to ``file``, if any; ignore a failure to write."""
        if not self._added:
            return
        # Another process may have written meanwhile.
        merged = read_kept(self.file) | self._added
        self._kept, self._added = (merged if len(merged) <= MOST_KEPT else dict(self._added)), {}
        content = json.dumps({key: astuple(syntax) for key, syntax in self._kept.items()}).encode()
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False) as partial:
                partial.write(checksum(content) + content)
            Path(partial.name).replace(self.file)


@cache
def kept_syntaxes() -> Syntaxes:
    """Return the cache shared by all processes of this user."""
    return Syntaxes(cache_file())


def read_kept(file: Path) -> dict[str, Syntax]:
    """Return the cached results in ``file``; none if it is missing, damaged or of another ``FORM``."""
    try:
        raw = file.read_bytes()
        first, content = raw[: len(checksum(b""))], raw[len(checksum(b"")) :]
        if first != checksum(content):
            return {}
        return {
            key: Syntax(digest, tuple(imports), tuple(data))
            for key, (digest, imports, data) in json.loads(content).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def checksum(content: bytes) -> bytes:
    return hashlib.sha256(b"%d\n" % FORM + content).hexdigest().encode() + b"\n"


def cache_file() -> Path:
    """Return the path of this user's cache file; its directory may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "slipstream" / "syntax.json"


def analyse_source(source: bytes) -> Syntax:
    """Analyse a source without the cache. Raises ``SyntaxError`` or ``ValueError`` if it is not Python."""
    tree = ast.parse(source)
    canonical: list[str] = []
    write_tree(tree, canonical)
    digest = hashlib.sha256("\0".join(canonical).encode("utf-8", "surrogatepass")).hexdigest()
    imports, data = names_in(tree)
    return Syntax(digest, tuple(sorted(imports)), tuple(sorted(data)))


def write_tree(node: ast.AST, into: list[str]) -> None:
    """Append a canonical form of the tree ``node`` to ``into``: node types, non-empty fields and constants."""
    if isinstance(node, ast.Constant):
        into.append(f"={type(node.value).__name__} {node.value!r}")
        return
    into.append(f"({type(node).__name__}")
    for name in node._fields:
        if name in SKIPPED:
            continue
        value: Any = getattr(node, name, None)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            value = without_docstrings(value)
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = join_fstring_constants(value)
        elif name == "args" and isinstance(node, ast.Call) and is_log(node.func):
            value = [argument for argument in value if not string_constants(argument)]
        if value is None or value == []:
            continue
        into.append(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                write_tree(item, into)
            else:
                into.append(repr(item))
    into.append(")")


def without_docstrings(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements without bare strings, such as docstrings."""
    return [each for each in body if not (isinstance(each, ast.Expr) and string_constants(each.value))]


def join_fstring_constants(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string, with adjacent constants joined and empty ones removed.

    Python versions split constants differently.
    """
    pieces: list[ast.expr] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            pieces.append(value)
        elif pieces and isinstance(pieces[-1], ast.Constant):
            pieces[-1] = ast.Constant(str(pieces[-1].value) + str(value.value))
        elif value.value:
            pieces.append(value)
    return pieces


def is_log(function: ast.expr) -> bool:
    """Return True for a logging method of ``LOG`` or ``logger(…)``.

    Literal texts among its arguments are excluded from the digest; f-strings, which compute, are included.
    """
    if not isinstance(function, ast.Attribute) or function.attr not in LOG_METHODS:
        return False
    owner = function.value.func if isinstance(function.value, ast.Call) else function.value
    return isinstance(owner, ast.Name) and owner.id in {"LOG", "logger"}


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the imported dotted names, and the texts that may be paths of data files.

    Such texts have the suffix of a data file, are right operands of ``/``, or arguments of ``joinpath`` or
    ``with_name``.
    """
    imports: set[str] = set()
    data: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (f"{node.module}." if node.module else "")
            imports.update(f"{origin}{alias.name}" for alias in node.names)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            data.update(string_constants(node.right))
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in {"joinpath", "with_name"}:
                data.update(text for argument in node.args for text in string_constants(argument))
        elif isinstance(node, ast.Constant):
            data.update(text for text in string_constants(node) if text.endswith(DATA_SUFFIXES))
    return imports, {text for text in data if text and not text.startswith((".", "/"))}


def string_constants(node: ast.expr) -> list[str]:
    """Return the string constant ``node`` as a list, empty for other nodes."""
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def data_files(source: Path, syntax: Syntax) -> Mapping[str, Path]:
    """Return the existing data files that a source names, by path relative to its directory."""
    found: dict[str, Path] = {}
    for name in syntax.data:
        place = source.parent / name
        candidates = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in candidates:
            if path.suffix in DATA_SUFFIXES and path.is_file():
                found[path.relative_to(source.parent).as_posix()] = path
    return found
