"""Compression between training and export: a smaller model, trained with the larger one as its teacher.

Its size is configured or searched.
"""

from __future__ import annotations

from typing import NamedTuple

from flytekit import conditional
from flytekit.core.promise import Promise

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Prepared, Trained
from slipstream.flyte.compat import patch_command_line
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.compress.config import ROUNDS
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.results.compression import Compression, CompressionTrial
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.stages import StageRun
from tasks.compress import Compressed, Proposal, choose, propose
from tasks.train import fine_tune, train

patch_command_line()


class ChosenModel(NamedTuple):
    """Chosen model, run of the first training, and the result of compression (None if not requested)."""

    artifact: Trained
    run: StageRun
    compression: Compression | None


def train_proposed(proposed: Proposal, teacher: Trained, prepared: Prepared) -> Promise:
    """Build the node that trains a smaller model; the fields of ``proposed`` are promises."""
    return fine_tune(
        start=proposed.start,
        teacher=teacher,
        prepared=prepared,
        training=proposed.training,
        teaching=proposed.teaching,
        factory=proposed.factory,
    )


@profile_workflow
def search_size(
    trained: Trained, prepared: Prepared, fine_tuned: Trained, run: StageRun, config: RunConfig
) -> Compressed:
    """Train further smaller models after the first, ``fine_tuned``, and choose one.

    Every model depends on the results before it. A search that ends early proposes its last model again, whose training
    is cached.
    """
    models, runs = [fine_tuned], [run]
    tried: list[CompressionTrial] = []
    for _ in range(ROUNDS - 1):
        proposed = propose(
            trained=trained, prepared=prepared, fine_tuned=models[-1:], runs=runs[-1:], tried=tried, config=config
        )
        tuned = train_proposed(proposed, trained, prepared)
        models, runs, tried = [*models, tuned.artifact], [*runs, tuned.run], proposed.tried
    return choose_taught_or_not(trained, prepared, models, runs, tried, config)


@profile_workflow
def take_candidate(
    trained: Trained, prepared: Prepared, fine_tuned: Trained, run: StageRun, config: RunConfig
) -> Compressed:
    """Choose between the only candidate, ``fine_tuned``, and the trained model."""
    return choose_taught_or_not(trained, prepared, [fine_tuned], [run], [], config)


def choose_taught_or_not(
    trained: Trained,
    prepared: Prepared,
    models: list[Trained],
    runs: list[StageRun],
    tried: list[CompressionTrial],
    config: RunConfig,
) -> Compressed:
    """Build the nodes that train the best student without its teacher, too, and choose a model.

    If there is nothing to compare, the last training is repeated, which is cached.
    """
    proposed = propose(
        trained=trained,
        prepared=prepared,
        fine_tuned=models[-1:],
        runs=runs[-1:],
        tried=tried,
        config=config,
        untaught=True,
    )
    tuned = train_proposed(proposed, trained, prepared)
    chosen = choose(
        trained=trained,
        prepared=prepared,
        fine_tuned=[*models, tuned.artifact],
        runs=[*runs, tuned.run],
        tried=proposed.tried,
        config=config,
    )
    return Compressed(chosen.artifact, chosen.compression)


# The branches below read the inputs of their own workflow. Flyte's compiler sorts the upstream nodes of a node, but not
# within a branch: a branch with several upstream nodes would register as another workflow every time.


@profile_workflow
def finish_compression(
    trained: Trained, prepared: Prepared, fine_tuned: Trained, run: StageRun, searches: bool, config: RunConfig
) -> Compressed:
    """Search the size if ``searches``; choose between the model ``fine_tuned`` and the trained one otherwise."""
    made = (
        conditional("size")
        .if_(searches.is_true())  # type: ignore[attr-defined]
        .then(search_size(trained=trained, prepared=prepared, fine_tuned=fine_tuned, run=run, config=config))
        .else_()
        .then(take_candidate(trained=trained, prepared=prepared, fine_tuned=fine_tuned, run=run, config=config))
    )
    return Compressed(made.artifact, made.compression)


@profile_workflow
def compress(trained: Trained, prepared: Prepared, config: RunConfig) -> Compressed:
    """Compress a trained model to the configured size, or as far as the gate allows."""
    proposed = propose(trained=trained, prepared=prepared, fine_tuned=[], runs=[], tried=[], config=config)
    tuned = train_proposed(proposed, trained, prepared)
    made = finish_compression(
        trained=trained,
        prepared=prepared,
        fine_tuned=tuned.artifact,
        run=tuned.run,
        searches=proposed.searches,
        config=config,
    )
    return Compressed(made.artifact, made.compression)


@profile_workflow
def train_alone(
    prepared: Prepared, model: ModelConfig, training: TrainingConfig, code: str, most_parameters: int
) -> ChosenModel:
    """Train a model without compression.

    It has the outputs of ``train_and_compress``, since both are branches of one conditional.
    """
    trained = train(prepared=prepared, model=model, training=training, code=code, most_parameters=most_parameters)
    return ChosenModel(trained.artifact, trained.run, None)


@profile_workflow
def train_and_compress(
    prepared: Prepared, model: ModelConfig, training: TrainingConfig, code: str, config: RunConfig
) -> ChosenModel:
    """Train a model, and compress it."""
    trained = train(prepared=prepared, model=model, training=training, code=code)
    smaller = compress(trained=trained.artifact, prepared=prepared, config=config)
    return ChosenModel(smaller.artifact, trained.run, smaller.compression)


@profile_workflow
def train_as_asked(
    prepared: Prepared, model: ModelConfig, training: TrainingConfig, code: str, most_parameters: int, config: RunConfig
) -> ChosenModel:
    """Train a model and, if ``most_parameters`` is 0 (see :class:`tasks.config.Sections`), compress it."""
    made = (
        conditional("compression")
        .if_(most_parameters == 0)
        .then(train_and_compress(prepared=prepared, model=model, training=training, code=code, config=config))
        .else_()
        .then(
            train_alone(prepared=prepared, model=model, training=training, code=code, most_parameters=most_parameters)
        )
    )
    return ChosenModel(made.artifact, made.run, made.compression)
