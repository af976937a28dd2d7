"""Requirements of an image, installed before the code is copied, so that code changes do not reinstall them.

    python requirements.py [PACKAGE ...]

Reads ``pyproject.toml`` and ``constraints.txt``. Writes ``image-requirements.txt`` (the dependencies of the project and
of its extra ``text``) and ``image-constraints.txt``. Every PACKAGE comes with the base image. It is left out of the
requirements and constrained to the installed version, so that pip never replaces it. Fails if a PACKAGE is not
installed, or older than the project needs.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path


def name_of(requirement: str) -> str:
    """Return the normalised package name, such as ``torch`` for ``torch>=2.11``."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def without(requirements: Iterable[str], packages: Iterable[str]) -> list[str]:
    left_out = {name_of(package) for package in packages}
    return [line for line in requirements if name_of(line) not in left_out]


def release(number: str) -> tuple[int, ...]:
    """Return a version as numbers, such as ``(2, 13, 0)`` for a vendor's pre-release ``2.13.0a0+rocm7.1``."""
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", number)[0].split(".")))


def refuse_older(requirements: Iterable[str], package: str) -> None:
    """Exit with an error if the base image's ``package`` is older than the project requires."""
    for requirement in requirements:
        least = re.search(r">=\s*([\d.]+)", requirement)
        if name_of(requirement) == name_of(package) and least and release(version(package)) < release(least[1]):
            sys.exit(f"BASE: has {package} {version(package)}; expected {requirement}; choose another base image")


def main(packages: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = project["dependencies"] + project["optional-dependencies"]["text"]
    constraints = without(Path("constraints.txt").read_text(encoding="utf-8").split(), packages)
    for package in packages:
        refuse_older(dependencies, package)
    installed = [f"{package}=={version(package)}" for package in packages]
    Path("image-requirements.txt").write_text("\n".join(without(dependencies, packages)) + "\n", encoding="utf-8")
    Path("image-constraints.txt").write_text("\n".join([*constraints, *installed]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
