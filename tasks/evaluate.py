"""Evaluation of the trained model, run in the pod of the export."""

from __future__ import annotations

from pathlib import Path

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.versions import code_version
from slipstream.flyte.artifact_types import Made
from slipstream.flyte.stage import run_stage
from tasks.model_and_data import ModelAndData


def evaluate_model(given: ModelAndData) -> Made:
    def make(directory: Path, key: str) -> Artifact:
        from slipstream.evaluate import engine

        model, data = given.open()
        made_by = {
            "code": code_version("evaluate"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
        }
        return engine.evaluate(directory, model, data, made_by)

    inputs = {"trained": given.trained, "prepared": given.prepared, "factory": given.factory}
    return run_stage("evaluate", inputs, make)
