"""Flyte tasks of compression that run before, between and after the trainings of smaller models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Prepared, Trained, artifact_uri
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import BY_VALUE, fresh_directory, local_path, map_errors, rows_path, runs_locally
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.results.compression import Compression, CompressionTrial
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.logs import logger
from slipstream.shared.models.config import TeachingConfig
from slipstream.shared.stages import StageRun

if TYPE_CHECKING:
    from slipstream.pipeline.compress.engine import CompressionRun

LOG = logger("compress")


class Proposal(NamedTuple):
    """Initial weights of the next smaller model and how to train it, and the results of all models before.

    ``searches`` is True if further models may follow; ``factory`` is the user's own model factory, or "".
    """

    start: Trained
    training: Annotated[TrainingConfig, BY_VALUE]
    teaching: Annotated[TeachingConfig, BY_VALUE]
    factory: str
    tried: list[CompressionTrial]
    searches: bool


class Compressed(NamedTuple):
    """Chosen model, and the result of the compression with the reason for the choice."""

    artifact: Trained
    compression: Compression


def work_on(trained: FlyteDirectory, prepared: FlyteDirectory, config: RunConfig) -> CompressionRun:
    from slipstream.pipeline.compress.engine import CompressionRun
    from slipstream.shared.artifacts.prepared.streamed import open_prepared
    from slipstream.shared.models.trained import TrainedModel

    model = TrainedModel.open(local_path(trained), config.model.factory)
    return CompressionRun(model, open_prepared(rows_path(prepared)), config.compression, config.training.seed)


def fine_tuning_settings(config: RunConfig) -> TrainingConfig:
    """Return the training settings of a smaller model."""
    training, compression = config.for_training(), config.compression
    return replace(
        training,
        epochs=compression.epochs or training.epochs,
        learning_rate=compression.learning_rate or training.learning_rate,
        checkpoint_uri="",  # a checkpoint directory belongs to one training
    )


@task(**stage_metadata("compress", cached=False))
@map_errors
def propose(
    trained: Trained,
    prepared: Prepared,
    fine_tuned: list[Trained],
    runs: list[StageRun],
    tried: list[CompressionTrial],
    config: RunConfig,
    untaught: bool = False,
) -> Proposal:
    """Evaluate the last trained candidate, if any, and create the next one, or the best one to train ``untaught``.

    ``fine_tuned`` and ``runs`` hold that candidate and its training, or are empty. This task is quick and not cached.
    Equal candidates have equal bytes, so their trainings are cached.
    """
    from slipstream.pipeline.compress import engine
    from slipstream.shared.models.factory_code import fingerprint_model

    work = work_on(trained, prepared, config)
    tried = evaluated_trials(work, fine_tuned, runs, tried)
    directory = fresh_directory("start")
    made_by = {
        "code": code_version("compress"),
        "trained": work.trained.artifact.fingerprint,
        "prepared": work.data.artifact.fingerprint,
        "model_code": fingerprint_model(work.trained.config),
        "method": config.compression.method,
    }
    teaching = config.compression.teaching
    if untaught and engine.untaught_candidate(tried, config.compression):
        teaching = replace(teaching, weight=0.0)
    engine.propose_model(directory, work, tried, made_by, untaught)
    return Proposal(
        FlyteDirectory(str(directory.absolute())),
        fine_tuning_settings(config),
        teaching,
        config.model.factory,
        tried,
        config.compression.searches,
    )


@task(**stage_metadata("compress", cached=False))
@map_errors
def choose(
    trained: Trained,
    prepared: Prepared,
    fine_tuned: list[Trained],
    runs: list[StageRun],
    tried: list[CompressionTrial],
    config: RunConfig,
) -> Compressed:
    """Choose a candidate or the trained model.

    The last of ``fine_tuned`` is the best student without its teacher, or repeats another. ``runs`` are the trainings.
    """
    from slipstream.pipeline.compress import engine
    from slipstream.shared.models.trained import TrainedModel

    work = work_on(trained, prepared, config)
    models = [TrainedModel.open(local_path(each), config.model.factory) for each in fine_tuned]
    model, found = engine.choose_model(work, models, tried)
    directories = [artifact_uri(each) for each in (trained, *fine_tuned)]
    address = directories[[work.trained, *models].index(model)]
    LOG.info("%s: %s", found.taken or "the trained model stays", found.why)
    # A pod returns its copy, so that the cache is keyed by content.
    here = address if runs_locally() else str(model.artifact.directory)
    seconds, reused = sum(each.seconds for each in runs), all(each.reused for each in runs)
    return Compressed(FlyteDirectory(here), replace(found, model=address, seconds=seconds, reused=reused))


def evaluated_trials(
    work: CompressionRun, fine_tuned: list[FlyteDirectory], runs: list[StageRun], tried: list[CompressionTrial]
) -> list[CompressionTrial]:
    from slipstream.pipeline.compress import engine
    from slipstream.shared.models.trained import TrainedModel

    for each, run in zip(fine_tuned, runs, strict=True):
        # A smaller model has the factory of the trained one.
        model = TrainedModel.open(local_path(each), work.trained.config.factory)
        tried = engine.evaluate_candidate(work, model, run.seconds, tried)
        LOG.info("%s: %s", tried[-1].name, tried[-1].answer)
    return tried
