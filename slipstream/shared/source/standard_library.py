"""Default data of ``data.task: language``: the Python files of the interpreter's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import Listing, list_source, local_file

ADDRESS = "Python's standard library"
#: Skipped directories: tests repeat each other, and installed packages differ between machines.
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "__pycache__")


def list_data(address: str, target: str, config: DataConfig) -> Listing:
    """List the files at an address; raise ``UserError`` if there are none.

    Without an address, the data is the standard library for language, else scikit-learn's digits.
    """
    if config.task == "language" and not address:
        return list_standard_library()
    return list_source(address, target, config)


def list_standard_library() -> Listing:
    folder = Path(sysconfig.get_path("stdlib"))
    return Listing(ADDRESS, tuple(local_file(path) for path in sorted(modules_below(folder))), str(folder))


def modules_below(folder: Path) -> Iterator[Path]:
    for current, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(current, name) for name in names if name.endswith(".py"))
