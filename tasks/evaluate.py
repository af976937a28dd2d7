"""The Flyte task of the evaluation."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.versions import code_version
from tasks.flyte.artifact_types import MadeEvaluated, Prepared, Trained
from tasks.flyte.metadata import on
from tasks.flyte.stage import local_path, map_errors, rows_path, run_stage


@task(**on("evaluate"))
@map_errors
def evaluate(trained: Trained, prepared: Prepared, factory: str = "") -> MadeEvaluated:
    """Score the trained model on the test split, beside a baseline. ``factory`` is the one that the user's
    configuration names, if any."""

    def make(directory: Path, key: str) -> Artifact:
        from slipstream.artifacts.prepared.streamed import open_prepared
        from slipstream.evaluate import engine
        from slipstream.models.trained import TrainedModel

        model, data = TrainedModel.open(local_path(trained), factory), open_prepared(rows_path(prepared))
        made_by = {
            "code": code_version("evaluate"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
        }
        return engine.evaluate(directory, model, data, made_by)

    return MadeEvaluated(*run_stage("evaluate", {"trained": trained, "prepared": prepared, "factory": factory}, make))
