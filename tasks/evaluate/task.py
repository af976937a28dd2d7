"""The door of the evaluation."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from tasks.artifact import Artifact
from tasks.hardware.on import on
from tasks.stage import ArtifactDirectory, Made, local_path, rows_path, run_stage
from tasks.versions import code_version


@task(**on("evaluate"))
def evaluate(trained: ArtifactDirectory, prepared: ArtifactDirectory) -> Made:
    """Score the trained model on the test split, beside a baseline."""

    def make(directory: Path, key: str) -> Artifact:
        from tasks.evaluate import engine
        from tasks.train.stream import open_prepared
        from tasks.train.trained import TrainedModel

        model, data = TrainedModel.open(local_path(trained)), open_prepared(rows_path(prepared))
        made_by = {
            "code": code_version("evaluate"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
        }
        return engine.evaluate(directory, model, data, made_by)

    return run_stage("evaluate", {"trained": trained, "prepared": prepared}, make)
