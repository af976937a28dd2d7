"""Size of the project's code, compared with the limits that it was given in November 2026.

    python benchmarks/code_size.py [OPTIONS]

Counted are ``slipstream/`` without ``slipstream/operations/proofs``, ``tasks/`` and ``workflows/``. A statement is a
node ``ast.stmt`` that is not a docstring. A repetition is one of at least six lines, without imports, signatures,
comments and docstrings, that pylint finds (``make repetitions``); it is not counted without pylint.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from harness.command import benchmark
from harness.table import Column, Table

ROOT = Path(__file__).parents[1]
COUNTED = ("slipstream", "tasks", "workflows")
SMALL_LINES = 40
COLUMNS = (Column("now", "now", "{:,.0f}"), Column("limit", "limit", "{:,.0f}"))


@benchmark
def main(quick: bool) -> Iterator[Table]:
    """Count statements, names, files and repetitions; quick: without repetitions."""
    sources = {path: path.read_text(encoding="utf-8") for path in counted_files()}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    modules = [path for path in sources if path.name != "__init__.py"]
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    figures = {
        "statements": (sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes), 30_000),
        "class names with two meanings": (sum(times > 1 for times in classes.values()), 0),
        "files other than __init__.py": (len(modules), 380),
        "files under 40 lines with a single importer": (len(list(small_files(sources, trees))), 0),
        "lines of the longest function": (max(map(function_lines, nodes)), 85),
        "lines of tests/": (tests, 55_000),
    }
    if not quick and find_spec("pylint"):
        figures["repetitions of six lines"] = (repetitions(), 0)
    yield Table("code", COLUMNS, {name: {"now": now, "limit": limit} for name, (now, limit) in figures.items()})


def counted_files() -> Sequence[Path]:
    found = [path for folder in COUNTED for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if not path.is_relative_to(ROOT / "slipstream/operations/proofs")]


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def function_lines(node: ast.AST) -> int:
    return (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0


def small_files(sources: dict[Path, str], trees: dict[Path, ast.Module]) -> Iterator[Path]:
    """Yield modules of fewer than 40 lines that exactly one other module imports."""
    importers: Counter[str] = Counter()
    for tree in trees.values():
        importers.update({name for node in ast.walk(tree) for name in imported_names(node)})
    for path, source in sources.items():
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        if path.name != "__init__.py" and len(source.splitlines()) < SMALL_LINES and importers[name] == 1:
            yield path


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the absolute names that an import statement may load as modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def repetitions() -> int:
    command = [sys.executable, "-m", "pylint", *COUNTED]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return len(re.findall("R0801", found))


if __name__ == "__main__":
    main()
