"""Writer of a directory of manifests, completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.operations.manifests.documents import MARK, ManifestFile
from slipstream.shared.artifacts.workspaces import temporary_workspace
from slipstream.shared.errors import UserError
from slipstream.shared.storage.local import writing_to


def write_manifests(files: Sequence[ManifestFile], out: Path) -> None:
    """Write the files to the directory ``out`` in place of an earlier call's files.

    Raises ``UserError`` if it holds other files, or cannot be written.
    """
    refuse_others(out)
    out = out.absolute() if not out.is_symlink() else out.resolve()
    with writing_to(out), temporary_workspace(out.parent) as scratch:
        whole = scratch / "new"
        for file in files:
            path = whole / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
        exchange_directories(whole, out, scratch / "old")


def exchange_directories(whole: Path, out: Path, old: Path) -> None:
    """Rename ``out``, if present, to ``old``, and ``whole`` to ``out``."""
    had = out.exists()
    if had:
        out.rename(old)
    try:
        whole.rename(out)
    except OSError:
        if had:
            old.rename(out)
        raise


def refuse_others(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is not a directory; choose another name")
    if Path.cwd().is_relative_to(out.resolve()):
        raise UserError(
            f"--out {out}: holds the working directory, and would be replaced; choose a directory below or next to it"
        )
    for parent, _, names in os.walk(out):
        for name in sorted(names):
            if not is_own(path := Path(parent, name)):
                raise UserError(
                    f"--out {out}: {path.relative_to(out)} was not written by slipstream manifests; choose another "
                    "directory, as its files are replaced"
                )


def is_own(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with writing_to(path), path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()
