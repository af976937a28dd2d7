"""The last stage: ``runs/<timestamp>/`` with the page, the figures and the model, all of it or nothing."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.artifacts.format import MANIFEST, Artifact, canonical_json
from tasks.artifacts.store import sweep
from tasks.report.page import document
from tasks.report.results import Results
from tasks.report.summarise import CARD, CARD_DATA, MODEL, MODEL_FILE, REPORT, SUMMARY, summarise
from tasks.report.summary import RunSummary, StageFigures, to_json


def build(runs: Path, results: Results, stages: Sequence[StageFigures], config: Mapping[str, Any]) -> RunSummary:
    """Make a new directory under ``runs``, named by the local time, and say what is in it.

    ``config`` is everything that was set, as nested dictionaries by section. Raises ``DamagedArtifact`` if the exported
    model or the data card is not what was written.
    """
    summary = summarise(results, stages, directory="")

    def fill(directory: Path, now: datetime) -> None:
        copy_model(results.exported, results.export, directory)
        copy_card(results.prepared, directory)
        (directory / SUMMARY).write_bytes(canonical_json(to_json(summary)))
        page = document(summary, results, config, now)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return dataclasses.replace(summary, directory=str(new_run(runs, fill)))


def new_run(runs: Path, fill: Callable[[Path, datetime], None]) -> Path:
    """A new directory under ``runs``, put together by ``fill`` beside its place and renamed when it is whole."""
    now = datetime.now()
    runs.mkdir(parents=True, exist_ok=True)
    sweep(runs)
    partial = runs / f".{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        fill(partial, now)
        return settle(partial, runs / now.strftime("%Y-%m-%dT%H-%M-%S"))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_card(prepared: Artifact, directory: Path) -> None:
    for name in (CARD, CARD_DATA):
        (directory / name).write_bytes(prepared.read_bytes(name))


def copy_model(exported: Artifact, export: Mapping[str, Any], directory: Path) -> None:
    """Copy the artifact, every byte of it verified, and the chosen variant once more under a name of its own."""
    exported.check()
    for name in (*exported.files, MANIFEST):
        target = directory / MODEL / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(exported.path(name), target)
    chosen = next(variant["file"] for variant in export["variants"] if variant["name"] == export["chosen"])
    shutil.copyfile(directory / MODEL / chosen, directory / MODEL_FILE)


def settle(directory: Path, place: Path) -> Path:
    """Rename ``directory`` to ``place``; if another run has just taken that name, to the first free one after it."""
    number = 1
    while True:
        candidate = place if number == 1 else place.with_name(f"{place.name}-{number}")
        try:
            # Fails if the name is taken: a run's directory is never empty.
            return directory.rename(candidate)
        except OSError:
            if not candidate.exists():
                raise
        number += 1
