"""What an image installs before the code is copied, so that a change of the code installs nothing again.

    python requirements.py [PACKAGE ...]

Reads ``pyproject.toml`` and ``constraints.txt`` and writes ``image-requirements.txt``, the project's dependencies with
those of its extra ``text``, and ``image-constraints.txt``. A PACKAGE is one that the base image brought: it is not
among the requirements, and it is constrained to the version that is installed, so that pip replaces it for nobody.
Fails if it is not installed, or older than the project needs.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path


def name_of(requirement: str) -> str:
    """``torch`` of ``torch>=2.11``, in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def without(requirements: Iterable[str], packages: Iterable[str]) -> list[str]:
    left_out = {name_of(package) for package in packages}
    return [line for line in requirements if name_of(line) not in left_out]


def release(number: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` of ``2.13.0a0+rocm7.1``: what vendors build before a release counts as that."""
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", number)[0].split(".")))


def refuse_older(requirements: Iterable[str], package: str) -> None:
    """End the build if the ``package`` of the base image is older than the project's requirement says."""
    for requirement in requirements:
        least = re.search(r">=\s*([\d.]+)", requirement)
        if name_of(requirement) == name_of(package) and least and release(version(package)) < release(least[1]):
            sys.exit(f"the base image has {package} {version(package)}, expected {requirement}: choose another BASE")


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
