"""Hooks with which Flyte's training task resumes or reuses a training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.pipeline.train.checkpoint.home import (
    CHECKPOINTS,
    CLAIMS,
    CheckpointDirectory,
    FinishedTraining,
    complete_checkpoints,
    newest_attempt,
)
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, Lease, last_heartbeat, wait_for_others
from slipstream.pipeline.train.config import STEP_VERSION, resume_settings
from slipstream.shared.artifacts.format import MANIFEST, Artifact, DamagedArtifact
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.logs import logger
from slipstream.shared.storage import STORES, MissingObject, download_all, storage_for

#: Inputs of a training's task by name; ``training`` holds its settings.
Inputs = Mapping[str, Any]

LOG = logger("train")


class UnfinishedTraining:
    def settled(self, inputs: Inputs) -> Inputs:
        prepared, training = inputs["prepared"], inputs["training"]
        address = str(prepared.remote_source or prepared.path)
        if address.startswith(STORES):
            return inputs
        data = open_prepared(Path(address))
        rows = data.training_rows
        model = {"model": inputs["model"].for_rows(rows, data.signature)} if "model" in inputs else {}
        return {**inputs, **model, "training": training.for_rows(rows)}

    def lasting(self, inputs: Inputs) -> Inputs:
        """Return the inputs that decide the result, without the code, since a training resumes after code edits."""
        from slipstream.pipeline.train.data_order import ORDER_VERSION

        versions = {"order": ORDER_VERSION, "step": STEP_VERSION}
        return {**inputs, "training": resume_settings(inputs["training"]), **versions}

    def address(self, home: str, inputs: Inputs) -> str:
        return inputs["training"].checkpoint_uri or home

    def take(self, home: str, holder: Holder, inputs: Inputs, directory: Path) -> bool:
        waited = wait_for_others(home, holder, inputs["training"].when_held)
        finished = finished_result(home, holder, waited=waited)
        if finished is None:
            return False
        if fetch_trained(finished.artifact, directory):
            LOG.info(
                "this training was completed by %s; its result is taken from %s", finished.holder, finished.artifact
            )
            return True
        CheckpointDirectory(storage_for(home)).reopen()
        return False

    def progress(self, home: str) -> str:
        return str(max((save.step for save in complete_checkpoints(storage_for(home).list(CHECKPOINTS))), default=""))

    def deliver(self, home: str, holder: Holder, inputs: Inputs) -> Callable[[str], None]:
        checkpoint_home = CheckpointDirectory(storage_for(home))
        attempt = newest_attempt(checkpoint_home.storage.list(CLAIMS))
        ours = checkpoint_home.holder_of(attempt) == holder
        sign = replace(last_heartbeat(checkpoint_home, attempt) or Heartbeat(), delivering=True)
        lease = Lease(checkpoint_home, attempt, sign=sign) if ours else None

        def delivered(artifact: str) -> None:
            if lease is None:
                return
            if inputs["training"].checkpoint_uri:
                lease.end()
            else:
                lease.drop()
                checkpoint_home.finish(holder, artifact, code_version(KIND))

        return delivered


def finished_result(address: str, holder: Holder, *, waited: bool) -> FinishedTraining | None:
    """Return the record of the finished training at ``address``, if ``holder`` may take its result.

    The same code must have finished the training, in an earlier attempt of the same execution or
    while ``holder`` waited. Otherwise the record is deleted and None returned.
    """
    home = CheckpointDirectory(storage_for(address))
    finished = home.finished()
    if finished is None:
        return None
    same_code = finished.code == code_version(KIND)
    if same_code and (waited or holder.succeeds(finished.holder)):
        return finished
    why = "Flyte requested it again" if same_code else "other code completed it"
    LOG.warning("%s: already completed by %s; retraining (%s)", address, finished.holder, why)
    home.reopen()
    return None


def fetch_trained(artifact: str, directory: Path) -> bool:
    """Copy a trained model to ``directory`` and verify it; return False if it is absent or damaged."""
    try:
        if artifact.startswith(STORES):
            download_all(artifact, directory)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            trained = Artifact.open(Path(artifact), KIND)
            for name in (*trained.files, MANIFEST):
                trained.link_file(name, directory / name)
        Artifact.open(directory, KIND).check()
    except (DamagedArtifact, MissingObject) as error:
        LOG.warning("%s; the model is trained again", error.message)
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True
