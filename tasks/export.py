"""Flyte tasks of the export, alone or after the evaluation of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.versions import code_version
from slipstream.export.config import ExportConfig
from slipstream.flyte.artifact_types import Evaluated, Exported, Made, MadeExported, Prepared, Trained
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import map_errors, run_stage
from slipstream.settings import to_dict
from slipstream.stages import StageRun
from tasks.evaluate import evaluate_model
from tasks.model_and_data import ModelAndData


class EvaluatedAndExported(NamedTuple):
    """Artifacts and runs of evaluation and export."""

    evaluated: Evaluated
    evaluation: StageRun
    exported: Exported
    export: StageRun


@task(**stage_metadata("export", in_its_pod=("evaluate",)))
@map_errors
def evaluate_and_export(
    trained: Trained, prepared: Prepared, config: ExportConfig, machine: str = "", factory: str = "", code: str = ""
) -> EvaluatedAndExported:
    """Evaluate the trained model, then export it as :func:`export` does."""
    given = ModelAndData(trained, prepared, factory)
    evaluated, exported = evaluate_model(given), make_export(given, config, code)
    return EvaluatedAndExported(*evaluated, *exported)


@task(**stage_metadata("export"))
@map_errors
def export(
    trained: Trained, prepared: Prepared, config: ExportConfig, machine: str = "", factory: str = "", code: str = ""
) -> MadeExported:
    """Export the trained model to ONNX, quantise it, measure the variants and choose one.

    ``factory`` is the user's own model factory, or "". ``machine`` (hardware of this pod) and ``code`` (digest of the
    user's model code) are only part of the cache key, so that a change of either repeats the export.
    """
    return MadeExported(*make_export(ModelAndData(trained, prepared, factory), config, code))


def make_export(given: ModelAndData, config: ExportConfig, code: str) -> Made:
    def make(directory: Path, key: str) -> Artifact:
        from slipstream.export import engine

        model, data = given.open()
        made_by = {
            "config": to_dict(config),
            "code": code_version("export"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
            "model_code": code,
        }
        return engine.export(directory, model, data, config, made_by)

    inputs = {"trained": given.trained, "prepared": given.prepared, "factory": given.factory}
    return run_stage("export", {**inputs, "config": config, "code": code}, make)
