"""Run directory ``runs/<time>-<data>/``, written completely or not at all."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.shared.artifacts.format import MANIFEST, Artifact
from slipstream.shared.artifacts.results.export import DIGEST, MODEL_CARD, ExportReport, digest_line
from slipstream.shared.artifacts.workspaces import temporary_workspace

#: Names of files and directories in a run directory.
REPORT, MODEL, SUMMARY = "report.html", "model", "summary.json"
PREPARED, TRAINED = "prepared", "trained"
CARD, CARD_DATA = "card.html", "card.json"
ONNX, RAW_MODEL = "model.onnx", "model.raw.onnx"
#: Copy of the model card with the date.
DATED_CARD = MODEL_CARD
#: Maximum length of the data's part of a directory's name.
LONGEST_NAME = 24


@dataclass(frozen=True)
class RunOrigin:
    """Origin of a run: ``run`` in ``summary.json``."""

    #: Command line, or the name of the execution on a cluster.
    command: str
    #: Commit of the code; "" if unknown.
    commit: str
    #: The workflow's inputs besides its configuration.
    inputs: Mapping[str, str]
    #: Settings that differ from the defaults, and all settings.
    changed: Mapping[str, Any]
    settings: Mapping[str, Any]


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def model_file(export: ExportReport) -> str:
    """Return the path of the recommended variant in a run directory, the same for every variant.

    Without variants, it is the directory of files for other libraries.
    """
    return f"{MODEL}/{ONNX if export.variants else export.libraries[0].name}"


def new_run(runs: Path, fill: Callable[[Path, datetime], None], source: str = "") -> Path:
    """Create a directory under ``runs``, named by the local time and the data at ``source``.

    ``fill`` writes into a hidden sibling, which is renamed when complete and removed on failure.
    """
    now = datetime.now()
    with temporary_workspace(runs) as partial:
        fill(partial, now)
        return rename_to_free(partial, runs / "-".join([now.strftime("%Y-%m-%dT%H-%M-%S"), *name_of(source)]))


def name_of(source: str) -> list[str]:
    """Return the first words of an address's last part, without its suffix."""
    words = re.findall(r"\w+", source.rstrip("/").rpartition("/")[2].partition(".")[0].lower())
    return textwrap.shorten(" ".join(words), LONGEST_NAME, placeholder="").split() or [
        each[:LONGEST_NAME] for each in words[:1]
    ]


def rename_to_free(directory: Path, wanted: Path) -> Path:
    """Rename ``directory`` to ``wanted``, or to the next free name if another run took ``wanted``."""
    number = 1
    while True:
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            # Fails if the name is taken, because a run's directory is never empty.
            return directory.rename(candidate)
        except OSError:
            if not candidate.exists():
                raise
        number += 1


def copy_model(exported: Artifact, directory: Path) -> None:
    """Copy the exported artifact to a run directory, verifying every byte, and write its digest."""
    exported.check()
    for name in (*exported.files, MANIFEST):
        target = directory / MODEL / name
        target.parent.mkdir(parents=True, exist_ok=True)
        exported.copy_file(name, target)
    (directory / MODEL / DIGEST).write_text(digest_line(exported.fingerprint), encoding="utf-8")


def link_artifact(artifact: Artifact, directory: Path) -> None:
    """Hard-link the artifact into ``directory``; copy if the file system lacks links."""
    for name in (*artifact.files, MANIFEST):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        artifact.link_file(name, target)
