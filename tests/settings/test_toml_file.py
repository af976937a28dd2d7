"""TOML files are read as `tomllib` reads them, or refused in one line: too long, too deep, too large numbers."""

import tomllib
from pathlib import Path

import pytest

from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from slipstream.shared.toml_file import DEEPEST, LARGEST_BYTES, LARGEST_INTEGER, read_toml
from tests.support.wording import refuses

TABLES = [path for floor in ("slipstream", "workflows") for path in sorted((ROOT / floor).rglob("*.toml"))]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_file_of_this_project_is_read_as_tomllib_reads_it(path: Path) -> None:
    assert read_toml(path) == tomllib.loads(path.read_text(encoding="utf-8"))


def test_what_is_within_the_limits_is_read(tmp_path: Path) -> None:
    nested = "[" * (DEEPEST - 2) + "1" + "]" * (DEEPEST - 2)
    text = f'a = {LARGEST_INTEGER}\nb = {nested}\n"c.d"."e\\"" = [{"0.5, " * 99}]\r\n'
    (tmp_path / "t.toml").write_bytes(text.encode())
    assert read_toml(tmp_path / "t.toml") == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'9' * 5000}",
        f"a = [{{b = {LARGEST_INTEGER + 1}}}]",
        f"a = 0x{'f' * 5000}",
        f"a = {'[' * 3000}",
        f"a = {'{a=' * 3000}",
        f"a = {'[' * DEEPEST}{']' * DEEPEST}",
        f"{'.'.join('a' * 32_000)} = 1",
        f"[{' . '.join(['a']) + ' . b' * 99}]",
        '"a\\"".' * 99 + "b = 1",
        "a = [",
        "a = \udcff",
        "#" * (LARGEST_BYTES + 1),
    ],
    ids=range(12),
)
def test_what_is_beyond_them_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.toml").write_bytes(text.encode(errors="surrogateescape"))
    with refuses(UserError):
        read_toml(tmp_path / "t.toml")


def test_nothing_else_reads_toml() -> None:
    """A second reader would have limits of its own, or none."""
    readers = [path for floor in ("slipstream", "tasks", "workflows") for path in (ROOT / floor).rglob("*.py")]
    assert [path.name for path in readers if "import tomllib" in path.read_text(encoding="utf-8")] == ["toml_file.py"]
