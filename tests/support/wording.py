"""Golden files of the wording of messages.

``messages.json`` in a directory of tests holds the messages that its tests compare, in order. After a rewording,
``STORE=1 pytest PATH`` writes it again, so the diff of the golden files shows every change.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

from tests.support import REPOSITORY

GOLDEN = "messages.json"
STORING = "STORE" in os.environ
#: What differs between machines and runs, as patterns, and what stands for it.
PLACEHOLDERS = {
    r"(?:/[\w.-]+)*/(?:pytest-of-[\w.-]+/pytest-\d+(?:/popen-gw\d+)?(?:/[\w-]+)?|(?:tmp|flyte)[a-z0-9_]{8}\b)": "<tmp>",
    r"(?<=/bucket/)test_\w+": "<tmp>",
    re.escape(str(REPOSITORY)): "<repository>",
    r"(?<![\w.])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{12,}\b": "<digest>",
    r"\b0x[0-9a-f]+\b": "<address>",
    r"\b\d+(?= MiB free)|(?<=differ by )\d[\d.e-]*|(?<=more than the )\d[\d.e-]*(?= that rounding)": "<number>",
    r"(?<=raised TypeError: )empty\(\).*": "<words of torch>",
    r"(?<= for )\d+(?= s \(away\))": "<number>",
    r"(?<=127\.0\.0\.1:)\d+|(?<=localhost:)\d+": "<port>",
}
#: The names of all tests by file, for the files that pytest collected whole.
collected: dict[Path, set[str]] = {}

Error = TypeVar("Error", bound=BaseException)


class RunningTest:
    """The test that runs, with its golden messages and those that it has compared so far."""

    def __init__(self, path: Path, name: str) -> None:
        self.golden, self.name = path.with_name(GOLDEN), f"{path.name}::{name}"
        self.stored, self.said = read(self.golden).get(self.name, []), list[str]()
        self.passed = False
        self.remedy = f"{self.golden} has other messages; if these are right: STORE=1 pytest {path}"

    def compare(self, text: str) -> None:
        """Raise an AssertionError if the next message of the golden file is another one."""
        expected = self.stored[len(self.said)] if len(self.said) < len(self.stored) else None
        self.said.append(text)
        assert STORING or text == expected, f"{self.remedy}\n  stored: {expected}\n  now:    {text}"

    def end(self) -> None:
        """Raise an AssertionError if the golden file has more messages."""
        assert STORING or len(self.said) == len(self.stored), self.remedy
        self.passed = True

    def store(self) -> None:
        if STORING and self.passed and self.said != self.stored:
            update(self.golden, {self.name: self.said})


running: RunningTest | None = None


@contextlib.contextmanager
def compared(path: Path, name: str) -> Iterator[None]:
    """Let messages be those of the test ``name``. Files are used before its fixtures begin and after they ended."""
    global running
    outer, running = running, RunningTest(path, name)
    try:
        yield
        running.store()
    finally:
        running = outer


def end() -> None:
    """Note that the body of the running test passed."""
    assert running
    running.end()


def same_wording(text: str) -> None:
    """Compare a message or line of output with the golden file of the running test."""
    assert running, "no test runs in this process"
    for pattern, placeholder in PLACEHOLDERS.items():
        text = re.sub(pattern, placeholder, text)
    running.compare(text.rstrip())


@contextlib.contextmanager
def refuses(
    kind: type[Error] | tuple[type[Error], ...], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Work as ``pytest.raises``, and compare the message; ``match`` is for names and numbers in it."""
    with pytest.raises(kind, match=match) as error:
        yield error
    same_wording(str(error.value))


def line_with(key: str, text: str) -> str:
    """Return the only line of ``text`` with the name or number ``key``."""
    (line,) = [line for line in text.splitlines() if key in line]
    return line.strip()


@cache
def read(golden: Path) -> dict[str, list[str]]:
    return json.loads(golden.read_text(encoding="utf-8")) if golden.exists() else {}


def update(golden: Path, messages: dict[str, list[str]]) -> None:
    """Replace the messages of tests, removing those without any, while no other process does."""
    with FileLock(Path(tempfile.gettempdir(), f"{sha256(bytes(golden)).hexdigest()}.lock")):
        read.cache_clear()
        found = {name: said for name, said in (read(golden) | messages).items() if said}
        read.cache_clear()
        golden.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def vanished(golden: Path) -> list[str]:
    """Return the names in a golden file whose tests are gone, as far as pytest has collected their files."""
    found = []
    for name in read(golden):
        file, _, test = name.partition("::")
        path = golden.with_name(file)
        if not path.exists() or test not in collected.get(path, {test}):
            found.append(name)
    return found


def note(items: list[pytest.Item], config: pytest.Config) -> None:
    """Note the tests that pytest collected; if messages are stored, remove those of tests that are gone."""
    if base := config.getoption("basetemp"):
        PLACEHOLDERS[rf"{re.escape(str(Path(base).resolve()))}(?:/popen-gw\d+)?(?:/[\w-]+)?"] = "<tmp>"
    if any("::" in argument for argument in config.args):
        return
    for item in items:
        collected.setdefault(item.path, set()).add(item.nodeid.partition("::")[2])
    if STORING:
        for golden in {path.with_name(GOLDEN) for path in collected}:
            if names := vanished(golden):
                update(golden, {name: [] for name in names})
