"""Export of the trained model, as the function of a Flyte task."""

from __future__ import annotations

from pathlib import Path

from slipstream.flyte.artifact_types import MadeExported, Prepared, Trained
from slipstream.flyte.functions.model_and_data import ModelAndData
from slipstream.flyte.stage import run_stage
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.settings import to_dict


def export(
    trained: Trained, prepared: Prepared, config: ExportConfig, machine: str = "", factory: str = "", code: str = ""
) -> MadeExported:
    """Export the trained model to ONNX, quantise it, measure the variants and choose one.

    ``factory`` is the user's own model factory, or "". ``machine`` (hardware of this pod) and ``code`` (digest of the
    user's model code) are only part of the cache key, so that a change of either repeats the export.
    """
    given = ModelAndData(trained, prepared, factory)

    def make(directory: Path, key: str) -> Artifact:
        from slipstream.pipeline.export import engine

        model, data = given.open()
        made_by = {
            "config": to_dict(config),
            "code": code_version("export"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
            "model_code": code,
        }
        return engine.export(directory, model, data, config, made_by)

    inputs = {"trained": trained, "prepared": prepared, "factory": factory, "config": config, "code": code}
    return MadeExported(*run_stage("export", inputs, make))
