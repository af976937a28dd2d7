"""Meaning of a module's source: a digest of its syntax tree, its imports and the data files that it reads.

The digest ignores docstrings, comments, formatting and the texts of log messages. It is equal on Python 3.11 to 3.14:
the walk skips parts of the trees that later versions added or store differently.

Parsing all sources takes about a second. The results are cached in the user's cache directory by the SHA-256 of the
source, so timestamps do not matter. The cache starts with a checksum: a damaged one is ignored. An unwritable directory
costs time only.
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

#: To be raised if the walk over the trees changes; results of another form are not used.
FORM = 1
#: Most cache entries, several times this project's sources; beyond it the cache starts empty.
MOST_KEPT = 5000
#: Fields of a tree without meaning, or absent from some versions of Python.
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
DATA_SUFFIXES = (".toml", ".html", ".css", ".js", ".json", ".jinja", ".txt", ".yaml")


@dataclass(frozen=True)
class Syntax:
    """Meaning of one source file."""

    #: SHA-256 (hex) of the canonical syntax tree.
    digest: str
    #: Every imported dotted name; ``from package import name`` gives ``package.name``. Relative ones keep dots.
    imports: tuple[str, ...]
    #: Relative paths that may name data files or directories next to the source.
    data: tuple[str, ...]


class Syntaxes:
    """Cache of syntax by source content, kept in ``file`` between processes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._kept = read_kept(file)
        self._added: dict[str, Syntax] = {}

    def of(self, source: bytes) -> Syntax:
        """Return the syntax of a source. Raises ``SyntaxError`` or ``ValueError`` if it is not Python."""
        key = hashlib.sha256(source).hexdigest()
        found = self._kept.get(key) or self._added.get(key)
        if found is None:
            found = self._added[key] = parse(source)
        return found

    def keep(self) -> None:
        """Write the results since the last call, if any; ignore a failure to write."""
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
    """Return the cache that this user's processes share."""
    return Syntaxes(cache_file())


def read_kept(file: Path) -> dict[str, Syntax]:
    """Return the cached results in ``file``; none if it is missing, damaged or of another form."""
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
    """Return the path of this user's cache; the directory may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "slipstream" / "syntax.json"


def parse(source: bytes) -> Syntax:
    """Parse a source file. Raises ``SyntaxError`` or ``ValueError``."""
    tree = ast.parse(source)
    canonical: list[str] = []
    write_tree(tree, canonical)
    digest = hashlib.sha256("\0".join(canonical).encode("utf-8", "surrogatepass")).hexdigest()
    imports, data = names_in(tree)
    return Syntax(digest, tuple(sorted(imports)), tuple(sorted(data)))


def write_tree(node: ast.AST, into: list[str]) -> None:
    """Append a canonical form of the tree below ``node``: names of nodes and of filled fields, and constants."""
    if isinstance(node, ast.Constant):
        into.append(f"={type(node.value).__name__} {node.value!r}")
        return
    into.append(f"({type(node).__name__}")
    for name in node._fields:
        if name in SKIPPED:
            continue
        value: Any = getattr(node, name, None)
        if name == "body" and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            value = without_docstring(value)
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = joined(value)
        elif name == "args" and isinstance(node, ast.Call) and is_log(node.func):
            value = [argument for argument in value if not texts(argument)]
        if value is None or value == []:
            continue
        into.append(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                write_tree(item, into)
            else:
                into.append(repr(item))
    into.append(")")


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements without a leading string."""
    first = body[0] if body else None
    return body[1:] if isinstance(first, ast.Expr) and texts(first.value) else body


def joined(values: list[ast.expr]) -> list[ast.expr]:
    """Return the pieces of an f-string, with neighbouring texts joined and empty ones removed."""
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
    """Return True for a method of ``LOG`` or of the result of ``logger(…)``.

    Literal texts among its arguments are not part of the digest; f-strings, which compute, are.
    """
    if not isinstance(function, ast.Attribute) or function.attr not in LOG_METHODS:
        return False
    owner = function.value.func if isinstance(function.value, ast.Call) else function.value
    return isinstance(owner, ast.Name) and owner.id in {"LOG", "logger"}


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the dotted names that the tree imports, and the texts that may be paths of data files.

    Such texts have the suffix of a data file, are divisors of a path, or are arguments of methods that join paths.
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
            data.update(texts(node.right))
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in {"joinpath", "with_name"}:
                data.update(text for argument in node.args for text in texts(argument))
        elif isinstance(node, ast.Constant):
            data.update(text for text in texts(node) if text.endswith(DATA_SUFFIXES))
    return imports, {text for text in data if text and not text.startswith((".", "/"))}


def texts(node: ast.expr) -> list[str]:
    """Return the text of a node, or an empty list for any other expression."""
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def data_files(source: Path, syntax: Syntax) -> Mapping[str, Path]:
    """Return the data files that a source reads, by their paths relative to its directory."""
    found: dict[str, Path] = {}
    for name in syntax.data:
        place = source.parent / name
        candidates = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in candidates:
            if path.suffix in DATA_SUFFIXES and path.is_file():
                found[path.relative_to(source.parent).as_posix()] = path
    return found
