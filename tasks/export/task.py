"""The Flyte task of the export."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from tasks.artifacts.format import Artifact
from tasks.artifacts.versions import code_version
from tasks.export.config import ExportConfig
from tasks.flyte.metadata import on
from tasks.flyte.stage import ArtifactDirectory, Made, local_path, map_errors, rows_path, run_stage
from tasks.settings import to_dict


@task(**on("export"))
@map_errors
def export(trained: ArtifactDirectory, prepared: ArtifactDirectory, config: ExportConfig) -> Made:
    """Export the trained model to ONNX, quantise it, measure the variants and choose one."""

    def make(directory: Path, key: str) -> Artifact:
        from tasks.artifacts.streamed import open_prepared
        from tasks.export import engine
        from tasks.models.trained import TrainedModel

        model, data = TrainedModel.open(local_path(trained)), open_prepared(rows_path(prepared))
        made_by = {
            "config": to_dict(config),
            "code": code_version("export"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
        }
        return engine.export(directory, model, data, config, made_by)

    return run_stage("export", {"trained": trained, "prepared": prepared, "config": config}, make)
