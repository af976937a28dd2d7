"""Compression between training and export: a smaller model, trained with the larger one as its teacher.

Its size is configured or searched.
"""

from __future__ import annotations

from typing import NamedTuple

from flytekit import conditional, workflow
from flytekit.core.promise import Promise

from slipstream.flyte.artifact_types import Prepared, Trained
from slipstream.flyte.compat import patch_command_line
from slipstream.pipeline.compress.config import ROUNDS, CompressionConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.stages import StageRun
from tasks.compress import Compressed, choose, propose
from tasks.config import Sections
from tasks.train import fine_tune, train

patch_command_line()


class ChosenModel(NamedTuple):
    """Chosen model, run of the first training, and the result of compression (None if not requested)."""

    artifact: Trained
    run: StageRun
    compression: Compression | None


def compression_rounds(
    number: int, given: dict[str, Promise], seed: Promise, fine_tuning: Promise, teaching: Promise
) -> Compressed:
    """Build the nodes that train ``number`` smaller models one after the other and choose one.

    Every model depends on the results before it. ``given`` are the trained model, the prepared data, the configuration
    and the user's model factory; all arguments but ``number`` are promises. A search that ends early proposes its last
    model again, whose training is cached.
    """
    again = {"teacher": given["trained"], "prepared": given["prepared"], "factory": given["factory"]}
    again |= {"training": fine_tuning, "teaching": teaching}
    fine_tuned: list[Promise] = []
    tried: Promise | list[Promise] = []
    for _ in range(number):
        last = fine_tuned[-1:]
        artifacts, runs = [one.artifact for one in last], [one.run for one in last]
        proposed = propose(**given, fine_tuned=artifacts, runs=runs, tried=tried, seed=seed)
        tried = proposed.tried
        fine_tuned.append(fine_tune(start=proposed.start, **again))
    chosen = choose(
        **given, fine_tuned=[one.artifact for one in fine_tuned], runs=[one.run for one in fine_tuned], tried=tried
    )
    return Compressed(chosen.artifact, chosen.compression)


@workflow
def compress_to_size(
    trained: Trained,
    prepared: Prepared,
    config: CompressionConfig,
    seed: int,
    fine_tuning: TrainingConfig,
    teaching: TeachingConfig,
    factory: str,
) -> Compressed:
    """Compress a trained model to the configured size."""
    given = {"trained": trained, "prepared": prepared, "config": config, "factory": factory}
    return compression_rounds(1, given, seed, fine_tuning, teaching)


@workflow
def compress_by_search(
    trained: Trained,
    prepared: Prepared,
    config: CompressionConfig,
    seed: int,
    fine_tuning: TrainingConfig,
    teaching: TeachingConfig,
    factory: str,
) -> Compressed:
    """Compress a trained model as far as the gate allows."""
    given = {"trained": trained, "prepared": prepared, "config": config, "factory": factory}
    return compression_rounds(ROUNDS, given, seed, fine_tuning, teaching)


# The branches below read the inputs of their own workflow. Flyte's compiler sorts the upstream nodes of a node, but not
# within a branch: a branch with several upstream nodes would register as another workflow every time.


@workflow
def compress(  # noqa: PLR0913 - a Flyte workflow: promises go in one by one
    trained: Trained,
    prepared: Prepared,
    size: str,
    config: CompressionConfig,
    seed: int,
    fine_tuning: TrainingConfig,
    teaching: TeachingConfig,
    factory: str,
) -> Compressed:
    """Compress a trained model; ``size`` is "given" or "searched"."""
    inputs = {"trained": trained, "prepared": prepared}
    inputs |= {"config": config, "seed": seed, "fine_tuning": fine_tuning, "teaching": teaching, "factory": factory}
    made = (
        conditional("size")
        .if_(size == "given")
        .then(compress_to_size(**inputs))
        .else_()
        .then(compress_by_search(**inputs))
    )
    return Compressed(made.artifact, made.compression)


@workflow
def train_alone(
    prepared: Prepared, model: ModelConfig, training: TrainingConfig, code: str, most_parameters: int
) -> ChosenModel:
    """Train a model without compression.

    It has the outputs of ``train_and_compress``, since both are branches of one conditional.
    """
    trained = train(prepared=prepared, model=model, training=training, code=code, most_parameters=most_parameters)
    return ChosenModel(trained.artifact, trained.run, None)


@workflow
def train_and_compress(  # noqa: PLR0913 - a Flyte workflow: promises go in one by one
    prepared: Prepared,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    size: str,
    config: CompressionConfig,
    seed: int,
    fine_tuning: TrainingConfig,
    teaching: TeachingConfig,
    factory: str,
) -> ChosenModel:
    """Train a model, and compress it."""
    trained = train(prepared=prepared, model=model, training=training, code=code)
    how = {
        "size": size,
        "config": config,
        "seed": seed,
        "fine_tuning": fine_tuning,
        "teaching": teaching,
        "factory": factory,
    }
    smaller = compress(trained=trained.artifact, prepared=prepared, **how)
    return ChosenModel(smaller.artifact, trained.run, smaller.compression)


@workflow
def train_as_asked(  # noqa: PLR0913 - a Flyte workflow: promises go in one by one
    prepared: Prepared,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    size: str,
    config: CompressionConfig,
    seed: int,
    fine_tuning: TrainingConfig,
    teaching: TeachingConfig,
    factory: str,
    most_parameters: int,
) -> ChosenModel:
    """Train a model and, unless ``size`` is "none", compress it."""
    inputs = {"prepared": prepared, "model": model, "training": training, "code": code}
    how = {
        "size": size,
        "config": config,
        "seed": seed,
        "fine_tuning": fine_tuning,
        "teaching": teaching,
        "factory": factory,
    }
    made = (
        conditional("compression")
        .if_(size == "none")
        .then(train_alone(**inputs, most_parameters=most_parameters))
        .else_()
        .then(train_and_compress(**inputs, **how))
    )
    return ChosenModel(made.artifact, made.run, made.compression)


def how_to_compress(sections: Sections) -> dict[str, Promise]:
    """Return the inputs of :func:`compress` and :func:`train_as_asked` from the ``sections`` (promises)."""
    return {
        "size": sections.size,
        "config": sections.compression,
        "seed": sections.seed,
        "fine_tuning": sections.fine_tuning,
        "teaching": sections.teaching,
        "factory": sections.factory,
    }
