"""Environment of an image that has the packages which docs/gpu.md lists, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import REPOSITORY

PAGE = REPOSITORY / "docs/gpu.md"
BLOCKER = '''"""Hides packages from every process that starts with this folder in PYTHONPATH."""
import importlib.abc
import sys

HIDDEN = frozenset({hidden!r})


class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hide())
'''


def listed_packages() -> list[str]:
    """Return the packages that docs/gpu.md says an image needs."""
    sentence = PAGE.read_text(encoding="utf-8").split("the image needs ")[1].split(".\n")[0]
    return re.findall(r"`([\w-]+)`", sentence)


def with_dependencies(packages: Iterable[str]) -> set[str]:
    """Return the packages and everything that they require, without extras."""
    found, waiting = set[str](), [canonicalize_name(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # Required on other systems only.
            continue
        waiting += [
            canonicalize_name(each.name)
            for each in requirements
            if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    return found


def hidden_modules() -> list[str]:
    """Return the top-level modules of installed packages that the image lacks."""
    present = with_dependencies([*listed_packages(), "pip", "setuptools"]) | {"slipstream"}
    return sorted(
        module
        for module, packages in packages_distributions().items()
        if not present & {canonicalize_name(name) for name in packages}
    )


def write_blocker(directory: Path) -> Path:
    """Write a ``sitecustomize.py`` that hides what the image lacks, and return the folder for PYTHONPATH."""
    (directory / "sitecustomize.py").write_text(BLOCKER.format(hidden=hidden_modules()))
    return directory
