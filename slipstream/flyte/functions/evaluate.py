"""Evaluation on the test split, as the function of a Flyte task."""

from __future__ import annotations

from pathlib import Path

from slipstream.flyte.artifact_types import MadeEvaluated, Prepared, Trained
from slipstream.flyte.functions.model_and_data import ModelAndData
from slipstream.flyte.stage import run_stage
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.versions import code_version


def evaluate(trained: Trained, prepared: Prepared, factory: str = "", code: str = "") -> MadeEvaluated:
    """Evaluate the trained model.

    ``factory`` is the user's own model factory, or "". ``code`` (digest of the user's model code) is only part of the
    cache key.
    """
    given = ModelAndData(trained, prepared, factory)

    def make(directory: Path, key: str) -> Artifact:
        from slipstream.pipeline.evaluate import engine

        model, data = given.open()
        made_by = {
            "code": code_version("evaluate"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
        }
        return engine.evaluate(directory, model, data, made_by)

    return MadeEvaluated(*run_stage("evaluate", {"trained": trained, "prepared": prepared, "factory": factory}, make))
