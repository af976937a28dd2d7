"""Untrusted names, and a store that holds any data under them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from slipstream.shared.storage import AlreadyThere, MissingObject, object_store
from slipstream.shared.storage.base import ObjectStat
from slipstream.shared.storage.names import LONGEST_PART

#: Each would lead out of a directory here or on another system, or tear a line apart.
HOSTILE = (
    *("../evil", "a/../../evil", "a/../evil", "..", ".", "a/./b", "a//b", "/proc/evil", "//proc/evil", "a/", ""),
    *("~/evil", "~root/evil", "C:evil", "c:/evil", "C:\\evil", "..\\evil", "a\\..\\evil", "\\\\host\\evil"),
    *(
        "a\0b",
        "a\nb",
        "a\r\nError: b",
        "\x1b[2Jb",
        "a\x85b",
        "a\u2028b",
        "a\udce9b",
        "a" * (LONGEST_PART + 1),
        "é" * 101,
        "a/" * 600 + "b",
    ),
)
PARTS = st.sampled_from(
    [
        "..",
        ".",
        "",
        "a",
        "b.json",
        "~",
        "~a",
        "C:",
        "a:b",
        "\\",
        "..\\a",
        "\0",
        "\n",
        "x" * LONGEST_PART,
        "é" * 101,
        "é",
        " ",
        "-",
    ]
)
#: Any name: parts as attacks have them, any text, and both.
NAMES = st.lists(PARTS | st.text(max_size=8), max_size=6).map("/".join) | st.text(max_size=40)


def anchored(name: str, place: Path) -> str:
    """Return ``name``, moved below ``place`` if it is absolute: wrong code must write there, and not anywhere on the
    machine."""
    return f"{place}{name}" if name.startswith("/") else name


@contextmanager
def target_among_others() -> Iterator[tuple[Path, Path]]:
    """A place with files of others, and the directory in it that may be written: deeper than a name leads up."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        target = place.joinpath(*"abcdefgh", "target")
        target.mkdir(parents=True)
        for other in (place / "evil", place / "b.json", target.parent / "evil", target.parent / "b.json"):
            other.write_text("of others")
        yield place, target


@dataclass
class MemoryBucket:
    """A bucket of Google's without Google, whose keys may be anything."""

    objects: dict[str, bytes] = field(default_factory=dict)

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        return [self.stat(key) for key in self.objects if key.startswith(prefix)], ""

    def stat(self, key: str) -> ObjectStat:
        return ObjectStat(key, len(self.objects[key]), "1")

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        return self.objects[key][start:end]

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None:
        if fresh and key in self.objects:
            raise AlreadyThere(key)
        self.objects[key] = data

    def put_file(self, key: str, path: Path, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self.objects[key] = path.read_bytes()

    def checksum(self, path: Path) -> str:
        return ""

    def delete(self, key: str) -> None:
        del self.objects[key]

    def explain(self, uri: str, error: Exception) -> Exception:
        return MissingObject(uri) if isinstance(error, KeyError) else error


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """What ``gs://`` and ``abfs://`` hold; import it into a test module to use it."""
    bucket = MemoryBucket()
    monkeypatch.setattr(object_store, "bucket_of", lambda scheme, name: bucket)
    return bucket


def outside(place: Path, target: Path) -> dict[str, bytes | None]:
    """All files and directories below ``place`` that are not below ``target``, with their bytes."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
        if target not in (path, *path.parents)
    }
