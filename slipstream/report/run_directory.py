"""``runs/<timestamp>/``: the whole directory of a run, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from slipstream.artifacts.format import MANIFEST, Artifact
from slipstream.artifacts.results.export import DIGEST, ExportReport, digest_line
from slipstream.artifacts.workspaces import workspace

#: What the directory of a run holds.
REPORT, MODEL, SUMMARY, PREPARED = "report.html", "model", "summary.json", "prepared"
CARD, CARD_DATA = "card.html", "card.json"
ONNX = "model.onnx"


def model_file(export: ExportReport) -> str:
    """The recommended variant, under a name that does not depend on which it is; of a model without variants the
    directory that other libraries load."""
    return f"{MODEL}/{ONNX if export.variants else export.libraries[0].name}"


def new_run(runs: Path, fill: Callable[[Path, datetime], None]) -> Path:
    """A new directory under ``runs``, named by the local time.

    ``fill`` writes into a hidden directory beside it, which is renamed when it is complete and removed if it fails.
    """
    now = datetime.now()
    with workspace(runs) as partial:
        fill(partial, now)
        return rename_to_free(partial, runs / now.strftime("%Y-%m-%dT%H-%M-%S"))


def rename_to_free(directory: Path, wanted: Path) -> Path:
    """Rename ``directory`` to ``place``; if another run has just taken that name, to the first free one after it."""
    number = 1
    while True:
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            # Fails if the name is taken: a run's directory is never empty.
            return directory.rename(candidate)
        except OSError:
            if not candidate.exists():
                raise
        number += 1


def copy_model(exported: Artifact, directory: Path) -> None:
    """Copy the artifact, every byte verified, and its digest."""
    exported.check()
    for name in (*exported.files, MANIFEST):
        target = directory / MODEL / name
        target.parent.mkdir(parents=True, exist_ok=True)
        exported.copy_file(name, target)
    (directory / MODEL / DIGEST).write_text(digest_line(exported.fingerprint), encoding="utf-8")


def link_artifact(artifact: Artifact, directory: Path) -> None:
    """Put the artifact into ``directory`` as hard links, or as copies where the file system has no links."""
    for name in (*artifact.files, MANIFEST):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        artifact.link_file(name, target)
