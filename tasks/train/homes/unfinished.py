"""What a training leaves for the attempts and executions after it, as Flyte's side asks for it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts.format import Artifact, DamagedArtifact, link_or_copy
from tasks.artifacts.homes import Holder
from tasks.artifacts.results.training import KIND
from tasks.logs import logger
from tasks.storage import STORES, MissingObject, download_all, storage_for
from tasks.train.config import lasting
from tasks.train.homes.home import Home
from tasks.train.homes.waiting import result_of, wait_for_others

LOG = logger("train")


class UnfinishedTraining:
    """``inputs`` are those of a training's task: ``training`` holds its settings."""

    def lasting(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**inputs, "training": lasting(inputs["training"])}

    def address(self, home: str, inputs: Mapping[str, Any]) -> str:
        return inputs["training"].checkpoint_uri or home

    def take(self, home: str, holder: Holder, inputs: Mapping[str, Any], directory: Path) -> bool:
        waited = wait_for_others(home, holder, inputs["training"].when_held)
        finished = result_of(home, holder, waited=waited)
        if finished is None:
            return False
        if fetch(finished.artifact, directory):
            LOG.info("finished by %s: takes its result from %s", finished.holder, finished.artifact)
            return True
        Home(storage_for(home)).reopen()
        return False

    def finish(self, home: str, holder: Holder, artifact: str) -> None:
        Home(storage_for(home)).finish(holder, artifact)


def fetch(artifact: str, directory: Path) -> bool:
    """Bring a trained model here, every byte verified; whether it is there and whole."""
    try:
        if artifact.startswith(STORES):
            download_all(artifact, directory)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            for name in ("manifest.json", *Artifact.open(Path(artifact), KIND).files):
                link_or_copy(Path(artifact) / name, directory / name)
        Artifact.open(directory, KIND).check()
    except (DamagedArtifact, MissingObject) as error:
        LOG.warning("%s; trains again", error.message)
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True
