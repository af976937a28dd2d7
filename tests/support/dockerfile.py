"""Parser of Dockerfiles for questions about the order of instructions."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from tests.support import REPOSITORY


class Instruction(NamedTuple):
    """``RUN``, ``COPY`` … and what follows it, continuation lines joined."""

    name: str
    value: str


def instructions(path: Path) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def copied(instruction: Instruction) -> list[str]:
    """The paths that a ``COPY`` takes from the repository."""
    *sources, _ = [word for word in instruction.value.split() if not word.startswith("--")]
    return sources


def ignored(path: str) -> bool:
    """Whether ``.dockerignore`` keeps ``path`` from the builder: the last rule that matches it or a parent decides."""
    parts = path.split("/")
    parents = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    verdict = False
    for rule in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").removeprefix("**/")
            tried = parts if rule.removeprefix("!").startswith("**/") else parents
            # A star of Docker's stays within a directory, so that only paths of as many parts can match.
            if any(fnmatch(one, pattern) and one.count("/") == pattern.count("/") for one in tried):
                verdict = not rule.startswith("!")
    return verdict
