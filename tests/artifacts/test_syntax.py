"""Digests of source code: which changes count, and how digests are cached."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.shared.artifacts import syntax
from slipstream.shared.artifacts.syntax import Syntaxes, analyse_source, data_files
from slipstream.shared.artifacts.versions import ROOT

SOURCE = """
import os
def double(x: int) -> int:
    LOG.info("doubles %s", x)
    return x + x if x else 0
class Empty: pass
class Filled:
    number: int = 1
TEXT = f"{os.sep}a"
"""
EQUAL = {
    "a comment": SOURCE + "# why\n",
    "a docstring of the module": '"""What."""' + SOURCE,
    "a docstring of a function": SOURCE.replace("int:\n", 'int:\n    """What."""\n'),
    "a docstring below a field": SOURCE.replace("= 1\n", '= 1\n    """How many."""\n'),
    "formatting": SOURCE.replace("x + x", "(x\n        + x)"),
    "quotes": SOURCE.replace('f"{os.sep}a"', "f'{os.sep}a'"),
    "pieces of an f-string": SOURCE.replace('f"{os.sep}a"', 'f"{os.sep}" "a" f""'),
    "the text of a log message": SOURCE.replace("doubles", "multiplies"),
}
OTHER = {
    "a number": SOURCE.replace("else 0", "else 1"),
    "the type of a number": SOURCE.replace("else 0", "else 0.0"),
    "an operator": SOURCE.replace("x + x", "x - x"),
    "an argument": SOURCE.replace('("doubles %s", x)', '("doubles %s", x, x)'),
    "an empty argument": SOURCE.replace("x + x", "x + int('')"),
    "the text of an error": SOURCE + 'raise ValueError("expected a")',
    "another text of an error": SOURCE + 'raise ValueError("expected b")',
    "an empty text": SOURCE + "TEXT = ''",
    "a name": SOURCE.replace("double", "twice", 1),
    "a default of None": SOURCE.replace("(x: int)", "(x: int = None)"),
    "a decorator": SOURCE.replace("def double", "@cache\ndef double"),
}


@pytest.mark.parametrize("change", EQUAL)
def test_what_means_the_same_has_one_digest(change: str) -> None:
    assert (
        EQUAL[change] != SOURCE
        and analyse_source(EQUAL[change].encode()).digest == analyse_source(SOURCE.encode()).digest
    )


def test_what_means_something_else_has_another_digest() -> None:
    digests = {change: analyse_source(source.encode()).digest for change, source in {"none": SOURCE, **OTHER}.items()}
    assert len(set(digests.values())) == len(digests)


def test_the_imports_are_those_that_the_parser_finds() -> None:
    source = """
import os, tasks.a as a, tasks.b
from tasks.c import (one as first, two)
from . import near
from ..far import thing
def later():
    import tasks.f
    imports = "import tasks.no"
"""
    expected = {"os", "tasks.a", "tasks.b", "tasks.c.one", "tasks.c.two", ".near", "..far.thing", "tasks.f"}
    assert set(analyse_source(source.encode()).imports) == expected


def test_every_data_file_of_the_project_counts_for_a_module_that_reads_it() -> None:
    found = {
        path
        for source in (ROOT / "slipstream").rglob("*.py")
        for path in data_files(source, analyse_source(source.read_bytes())).values()
    }
    files = {path for path in (ROOT / "slipstream").rglob("*") if path.suffix in syntax.DATA_SUFFIXES}
    assert found == files and len(files) > 20


def test_digests_are_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache" / "syntax.json"
    first = Syntaxes(file)
    kept = first.of(SOURCE.encode())
    first.keep()

    def parses_nothing(source: bytes) -> syntax.Syntax:
        raise AssertionError("parsed again")

    monkeypatch.setattr(syntax, "analyse_source", parses_nothing)
    assert Syntaxes(file).of(SOURCE.encode()) == kept
    with pytest.raises(AssertionError, match="parsed again"):
        Syntaxes(file).of(SOURCE.encode() + b"#")


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "directory", "other form"])
def test_a_damaged_cache_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    file = tmp_path / "syntax.json"
    first = Syntaxes(file)
    kept = first.of(SOURCE.encode())
    first.keep()
    raw = file.read_bytes()
    place = raw.index(kept.digest.encode())
    if damage == "flipped":
        file.write_bytes(raw[:place] + (b"0" if raw[place : place + 1] != b"0" else b"1") + raw[place + 1 :])
    elif damage == "cut":
        file.write_bytes(raw[:-20])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        monkeypatch.setattr(syntax, "FORM", syntax.FORM + 1)
    again = Syntaxes(file)
    assert again.of(SOURCE.encode()) == kept and again._added
    again.keep()


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    syntaxes = Syntaxes(tmp_path / "file" / "syntax.json")
    assert syntaxes.of(SOURCE.encode()).digest
    syntaxes.keep()


#: Prints one digest of all sources of the project; it must run on a Python without any library.
DIGEST_OF_ALL = """
import hashlib, importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("syntax", sys.argv[1])
module = sys.modules["syntax"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
digest = hashlib.sha256()
for path in sorted(pathlib.Path(sys.argv[2]).rglob("*.py")):
    digest.update(module.analyse_source(path.read_bytes()).digest.encode())
print(digest.hexdigest())
"""


def pythons() -> list[str]:
    """Other Pythons of this machine that the project supports."""
    found = []
    for minor in range(11, 15):
        candidates = [f"python3.{minor}", *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for candidate in candidates if sys.version_info[1] != minor else ():
            try:
                ran = subprocess.run([candidate, "-c", "pass"], capture_output=True, timeout=30, check=False)
            except OSError:
                continue
            if ran.returncode == 0:
                found.append(candidate)
                break
    return found


@pytest.mark.prove
def test_the_digests_are_equal_on_all_versions_of_python() -> None:
    others = pythons()
    if not others:
        pytest.skip("this machine has one version of Python")

    def digest(python: str) -> str:
        command = [python, "-c", DIGEST_OF_ALL, str(Path(syntax.__file__)), str(ROOT / "slipstream")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    assert {digest(python) for python in [sys.executable, *others]} == {digest(sys.executable)}


def test_the_walk_knows_every_field_that_it_skips() -> None:
    """A field that a newer Python adds to the trees changes digests until it is looked at."""
    known = {name for node in vars(ast).values() if isinstance(node, type) for name in getattr(node, "_fields", ())}
    assert known >= syntax.SKIPPED - {"type_params"}
