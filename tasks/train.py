"""Flyte tasks of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict, Unpack

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.artifact_types import MadeTrained, Prepared, Trained, artifact_fingerprint, artifact_uri
from slipstream.flyte.elastic import Distributed, Fetch, TaskInputs, Workspace, distributed
from slipstream.flyte.metadata import WITH_DECK, stage_metadata
from slipstream.flyte.stage import local_path
from slipstream.pipeline.train.checkpoint.unfinished import UnfinishedTraining
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.logs import logger
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.settings import counted_settings, to_dict
from slipstream.shared.storage import STORES

LOG = logger("train")
#: Seconds of the grace period (between SIGTERM and SIGKILL) that are reserved for shutdown after the last save.
ENDING_S = 5


def fetch_prepared(directory: FlyteDirectory, placement: Placement, fresh: Path) -> Path:
    """Download prepared data, or make a stub that streams it if it exceeds the profile's ``data_cache_gib``."""
    from slipstream.shared.artifacts.prepared.streamed import artifact_size, make_stub

    uri, room = artifact_uri(directory), int(placement.data_cache_gib * 2**30)
    if not uri.startswith(STORES) or artifact_size(uri) <= room:
        return local_path(directory)
    LOG.info("streams %s: it is larger than profile.data_cache_gib, %g", uri, placement.data_cache_gib)
    return make_stub(uri, fresh, room // placement.processes)


def model_of(inputs: TaskInputs) -> ModelConfig:
    """Return the configuration of the model to train, new or trained before."""
    from slipstream.shared.models.trained import TrainedModel

    if "model" in inputs:
        return inputs["model"]
    return TrainedModel.open(Path(inputs["start"].path), inputs["factory"]).config


def processes_for(inputs: TaskInputs, placement: Placement) -> int:
    """Return 1 for a model that one process trains faster, else the placement's number."""
    from slipstream.pipeline.train.checks import suits_one_process

    small = suits_one_process(Path(inputs["prepared"].path), model_of(inputs), inputs["training"])
    return 1 if small else placement.processes


def check_before_training(inputs: TaskInputs, placement: Placement) -> None:
    from slipstream.pipeline.train.checks import check_training
    from slipstream.pipeline.train.memory.lasting import check_fits

    prepared, model = Path(inputs["prepared"].path), model_of(inputs)
    check_training(prepared, model, inputs["training"], placement.world_size, placement.nodes)
    if "model" in inputs:  # a pruned model takes less memory than its factory's
        check_fits(prepared, model, inputs["training"], placement.world_size, placement.nodes)
    if most_parameters := inputs.get("most_parameters"):
        from slipstream.pipeline.export.weights_alone import check_exportable

        check_exportable(prepared, model, most_parameters)


class TrainedModels(TypedDict, total=False):
    """Optional fields of a training request: trained model to start from, and teacher."""

    start: Path
    teacher: Path
    teaching: TeachingConfig
    factory: str


def run_in(
    workspace: Workspace,
    prepared: FlyteDirectory,
    model: ModelConfig,
    training: TrainingConfig,
    made_by: Mapping[str, object],
    **lineage: Unpack[TrainedModels],
) -> MadeTrained:
    """Train in a worker; without ``lineage`` there is no trained start model and no teacher."""

    def body() -> None:
        from slipstream.pipeline.train.request import TrainingRequest
        from slipstream.pipeline.train.run import run_attempt

        request = TrainingRequest(
            prepared=Path(prepared.path),
            model=model,
            training=training,
            directory=Path(workspace.directory),
            home=workspace.home,
            holder=workspace.holder,
            delivered_by_agent=True,
            notices=workspace.notices,
            grace_s=current_profile().placement("train").grace_seconds - ENDING_S,
            so_far=Path(workspace.so_far) if workspace.so_far else None,
            sampled=Path(workspace.sampled) if workspace.sampled else None,
            made_by={
                "code": code_version("train"),
                "prepared": artifact_fingerprint(prepared),
                "training": counted_settings(training),
                **made_by,
            },
            **lineage,
        )
        run_attempt(request)

    return workspace.work(body)


def live_deck_html(workspace: Workspace, inputs: TaskInputs, running: bool) -> str:
    """Return the HTML of the training's live deck, or "" in pods without rank 0."""
    from slipstream.pipeline.report.pages.rendering import training_page
    from slipstream.pipeline.train.so_far import read_progress
    from slipstream.pipeline.train.telemetry.pods import devices_so_far

    so_far = read_progress(Path(workspace.so_far), workspace.home, inputs["training"].rows_per_step, running=running)
    return training_page(so_far, datetime.now(UTC), devices_so_far(workspace.home)) if so_far else ""


def training_config(fetch: Fetch) -> Distributed:
    """Return the configuration of a task that trains and downloads its inputs with ``fetch``."""
    unfinished = UnfinishedTraining()
    made = distributed("train", fetch, check_before_training, unfinished=unfinished, watch=live_deck_html)
    return replace(made, processes=processes_for)


@task(
    task_config=training_config(fetch_prepared),
    **WITH_DECK,
    **stage_metadata("train", besides=("most_parameters",)),
)
def train(
    workspace: Workspace,
    prepared: Prepared,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    most_parameters: int = 0,
) -> MadeTrained:
    """Train the model in a process group.

    ``code`` is only part of the cache key, so that edited model code is trained again. A model that can only be
    exported to ONNX and has more than ``most_parameters`` is refused before training; 0 means no export.
    """
    return run_in(workspace, prepared, model, training, {"model": to_dict(model), "model_code": code})


def fetch_data_and_models(directory: FlyteDirectory, placement: Placement, fresh: Path) -> Path:
    """Fetch prepared data as :func:`fetch_prepared` does; download models completely."""
    return fetch_prepared(directory, placement, fresh) if fresh.suffix == ".prepared" else local_path(directory)


@task(
    task_config=training_config(fetch_data_and_models),
    **WITH_DECK,
    **stage_metadata("train"),
)
def fine_tune(
    workspace: Workspace,
    start: Trained,
    teacher: Trained,
    prepared: Prepared,
    training: TrainingConfig,
    teaching: TeachingConfig,
    factory: str = "",
) -> MadeTrained:
    """Continue training the model ``start``, with ``teacher`` as its teacher, in a process group.

    ``factory`` is the user's own model factory, or "".
    """
    made_by = {
        "start": artifact_fingerprint(start),
        "teacher": artifact_fingerprint(teacher),
        "teaching": to_dict(teaching),
    }
    lineage = TrainedModels(start=Path(start.path), teacher=Path(teacher.path), teaching=teaching, factory=factory)
    return run_in(workspace, prepared, ModelConfig(), training, made_by, **lineage)
