"""The door of training."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.artifacts.versions import code_version
from tasks.flyte.elastic import Workspace, distributed
from tasks.flyte.metadata import on
from tasks.flyte.stage import ArtifactDirectory, Made, fingerprint_of, local_path, map_errors
from tasks.hardware.profile import Placement
from tasks.models.config import ModelConfig
from tasks.settings import to_dict
from tasks.storage import S3
from tasks.train.config import TrainingConfig


@task(**on("fingerprint"))
@map_errors
def fingerprint_model_code(model: ModelConfig) -> str:
    """A fingerprint of the user's own model code, empty for the built-in networks. Never cached."""
    from tasks.models.source_code import fingerprint_model

    return fingerprint_model(model)


def fetch_prepared(directory: FlyteDirectory, place: Placement, fresh: Path) -> Path:
    """Prepared data from S3: all of it if the profile's cache holds it, else a stub through which it streams."""
    from tasks.artifacts.streamed import make_stub, size_of

    uri, room = str(directory.remote_source or directory.path), int(place.data_cache_gib * 2**30)
    if not uri.startswith(S3) or size_of(uri) <= room:
        return local_path(directory)
    print(f"train        streams {uri}: it is larger than profile.data_cache_gib, {place.data_cache_gib:g}", flush=True)
    return make_stub(uri, fresh, room // place.processes)


@task(task_config=distributed("train", fetch_prepared), **on("train"))
def train(
    workspace: Workspace, prepared: ArtifactDirectory, model: ModelConfig, training: TrainingConfig, code: str
) -> Made:
    """Train the model in a process group; ``code`` only makes edited model code new work."""

    def body() -> None:
        from tasks.train.run import run

        run(
            prepared=Path(prepared.path),
            model=model,
            training=training,
            directory=Path(workspace.directory),
            checkpoints_home=workspace.checkpoints,
            previous_checkpoints=workspace.previous_checkpoints,
            execution=workspace.execution,
            notices=workspace.notices,
            made_by={
                "code": code_version("train"),
                "model": to_dict(model),
                "model_code": code,
                "prepared": fingerprint_of(prepared),
                "training": to_dict(training),
            },
        )

    return workspace.work(body)
