"""Packages the workflows like ``pyflyte package`` and reads the package back."""

import functools
import os
import sys
from pathlib import Path

from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte
from flytekit.core.type_engine import DataclassTransformer

from slipstream.operations.doctor.archive import RegistrationArchive, read_package
from slipstream.operations.proofs.processes import FORK
from tests.support import REPOSITORY
from tests.support.once import made_once

IMAGE = "registry.example/slipstream:test"


def package(directory: Path, profile: str, **environment: str) -> RegistrationArchive:
    """Package for ``profile`` in a process without any Flyte to talk to.

    Raises ``AssertionError`` with what the command said if it failed.
    """
    archive, log = directory / "flyte.tgz", directory / "package.log"
    variables = {**os.environ, "FLYTE_PLATFORM_URL": "127.0.0.1:1", "SLIPSTREAM_PROFILE": profile, **environment}
    process = FORK.Process(target=run_package, args=(archive, log, variables))
    process.start()
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    return read_package(archive)


def packaged(place: Path, profile: str) -> Path:
    """Return the archive for ``profile``, made by the first process that asks for it below ``place``."""

    def make(directory: Path) -> None:
        directory.mkdir()
        package(directory, profile)

    return made_once(place / "packages" / profile, make) / "flyte.tgz"


def run_package(archive: Path, log: Path, environment: dict[str, str]) -> None:
    """The body of the process: it has flytekit, and imports the workflows for the profile of its environment."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    assert not any(name.split(".")[0] == "workflows" for name in sys.modules)
    # Flytekit derives the schemas of the same dataclasses again for every task, which takes most of the time.
    derive = DataclassTransformer.get_literal_type
    DataclassTransformer.get_literal_type = functools.cache(derive)
    pyflyte.main(["--pkgs", "workflows", "package", "--image", IMAGE, "--force", "--output", str(archive)])
