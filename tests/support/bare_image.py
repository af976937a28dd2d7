"""Environments that have some of the installed packages, and no others, such as those that docs/gpu.md lists."""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import REPOSITORY

PAGE = REPOSITORY / "docs/gpu.md"
BLOCKER = '''"""Hides packages from every process that starts with this folder in PYTHONPATH."""
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import MetadataPathFinder

MODULES, PRESENT = frozenset({modules!r}), frozenset({present!r})


class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MODULES else PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        for found in MetadataPathFinder.find_distributions(*context):
            if re.sub(r"[-_.]+", "-", found.name).lower() in PRESENT:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = Image
'''


def listed_packages() -> list[str]:
    """Return the packages that docs/gpu.md says an image needs."""
    sentence = PAGE.read_text(encoding="utf-8").split("the image needs ")[1].split(", each with")[0]
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


def present_in_image() -> set[str]:
    return with_dependencies([*listed_packages(), "pip", "setuptools"]) | {"slipstream"}


def hidden_modules(present: set[str]) -> list[str]:
    """Return the top-level modules of installed packages that are not ``present``."""
    vendored = {path.name for path in (Path(setuptools.__file__).parent / "_vendor").iterdir()}
    return sorted(
        module
        for module, packages in packages_distributions().items()
        if module not in vendored and not present & {canonicalize_name(name) for name in packages}
    )


def write_blocker(directory: Path, present: set[str]) -> Path:
    """Write a ``sitecustomize.py`` that hides all other packages, and return the folder for PYTHONPATH."""
    code = BLOCKER.format(modules=hidden_modules(present), present=sorted(present))
    (directory / "sitecustomize.py").write_text(code)
    return directory
