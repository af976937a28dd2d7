"""The Flyte task of the whole configuration: what each stage gets of it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from flytekit import task

from tasks.collectives.config import CollectivesConfig
from tasks.config import RunConfig
from tasks.export.config import ExportConfig
from tasks.flyte.metadata import on
from tasks.flyte.stage import BY_VALUE, map_errors
from tasks.hardware.profile import current_profile
from tasks.models.config import ModelConfig
from tasks.train.config import TrainingConfig


class Sections(NamedTuple):
    """The sections of a configuration, and what identifies the user's own model code ("" for built-in networks)."""

    model: Annotated[ModelConfig, BY_VALUE]
    training: Annotated[TrainingConfig, BY_VALUE]
    export: Annotated[ExportConfig, BY_VALUE]
    collectives: Annotated[CollectivesConfig, BY_VALUE]
    model_code: str


@task(**on("fingerprint"))
@map_errors
def read_config(config: RunConfig) -> Sections:
    """Hand the sections on. Never cached: edited model code is new work.

    Raises ``UserError`` before anything else runs if the layout of the training does not fit its processes.
    """
    from tasks.models.source_code import fingerprint_model

    place = current_profile().placement("train")
    if place.processes:  # else as many as the machine has
        config.training.parallel.sizes(place.nodes * place.processes, place.nodes)
    code = fingerprint_model(config.model)
    return Sections(config.model, config.for_training(), config.export, config.collectives, code)
