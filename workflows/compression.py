"""Between training and export: a smaller network with the trained one as its teacher; its size given, or searched."""

from __future__ import annotations

from typing import Any

from flytekit import conditional, workflow

from tasks.artifacts.compression import Compression
from tasks.compress.config import ROUNDS, CompressionConfig
from tasks.compress.task import choose, propose
from tasks.flyte.stage import ArtifactDirectory, Made
from tasks.models.config import ModelConfig, TeachingConfig
from tasks.train.config import TrainingConfig
from tasks.train.task import train, tune


def rounds(number: int, trained: Any, prepared: Any, before: list[Any], how: dict[str, Any], tuning: Any) -> Any:
    """Train ``number`` smaller networks one after another, each by what became of those before, and choose. The
    arguments are promises; ``before`` are the runs that came before, ``how`` says how networks are made smaller.

    Once the search or its time is over, the same network is proposed again, and its training is in the cache.
    """
    training, teaching = tuning
    tuned: list[Any] = []
    tried: Any = []
    for _ in range(number):
        last = tuned[-1:]
        proposed = propose(
            trained=trained,
            prepared=prepared,
            tuned=[one.artifact for one in last],
            runs=[one.run for one in last],
            tried=tried,
            **how,
        )
        tried = proposed.tried
        tuned.append(
            tune(start=proposed.start, teacher=trained, prepared=prepared, training=training, teaching=teaching)
        )
    return choose(
        trained=trained,
        prepared=prepared,
        tuned=[one.artifact for one in tuned],
        runs=[*before, *(one.run for one in tuned)],
        tried=tried,
        **how,
    )


@workflow
def compress_to_size(
    trained: ArtifactDirectory,
    prepared: ArtifactDirectory,
    method: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Compression:
    """Make a trained network as small as the configuration says."""
    how = {"method": method, "config": config, "seed": seed}
    return rounds(1, trained, prepared, [], how, (tuning, teaching)).compression


@workflow
def compress_by_search(
    trained: ArtifactDirectory,
    prepared: ArtifactDirectory,
    method: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Compression:
    """Make a trained network as small as the gate allows."""
    how = {"method": method, "config": config, "seed": seed}
    return rounds(ROUNDS, trained, prepared, [], how, (tuning, teaching)).compression


@workflow
def train_to_size(
    prepared: ArtifactDirectory,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    method: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Made:
    """Train, and make the network as small as the configuration says."""
    trained = train(prepared=prepared, model=model, training=training, code=code)
    how = {"method": method, "config": config, "seed": seed}
    chosen = rounds(1, trained.artifact, prepared, [trained.run], how, (tuning, teaching))
    return Made(chosen.artifact, chosen.run)


@workflow
def train_and_search(
    prepared: ArtifactDirectory,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    method: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Made:
    """Train, and make the network as small as the gate allows."""
    trained = train(prepared=prepared, model=model, training=training, code=code)
    how = {"method": method, "config": config, "seed": seed}
    chosen = rounds(ROUNDS, trained.artifact, prepared, [trained.run], how, (tuning, teaching))
    return Made(chosen.artifact, chosen.run)


# The branches below read the inputs of a workflow of their own: Flyte's compiler sorts what a node of a workflow waits
# for, but not within a branch, so that one that read of several nodes would register as another workflow each time.


@workflow
def compress(
    trained: ArtifactDirectory,
    prepared: ArtifactDirectory,
    method: str,
    size: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Compression:
    """Make a trained network smaller; its size is "given" or "searched"."""
    inputs = {"trained": trained, "prepared": prepared, "method": method, "config": config, "seed": seed}
    more = {"tuning": tuning, "teaching": teaching}
    return (
        conditional("size")
        .if_(size == "given")
        .then(compress_to_size(**inputs, **more))
        .else_()
        .then(compress_by_search(**inputs, **more))
    )


@workflow
def train_as_asked(
    prepared: ArtifactDirectory,
    model: ModelConfig,
    training: TrainingConfig,
    code: str,
    method: str,
    size: str,
    config: CompressionConfig,
    seed: int,
    tuning: TrainingConfig,
    teaching: TeachingConfig,
) -> Made:
    """Train and, unless ``method`` is "none", make the network smaller."""
    inputs = {"prepared": prepared, "model": model, "training": training, "code": code}
    more = {"method": method, "config": config, "seed": seed, "tuning": tuning, "teaching": teaching}
    made = (
        conditional("compression")
        .if_(method == "none")
        .then(train(**inputs))
        .elif_(size == "given")
        .then(train_to_size(**inputs, **more))
        .else_()
        .then(train_and_search(**inputs, **more))
    )
    return Made(made.artifact, made.run)


def how_to_compress(sections: Any) -> dict[str, Any]:
    """What the two workflows above take of the configuration's sections; promises."""
    return {
        "method": sections.method,
        "size": sections.size,
        "config": sections.compression,
        "seed": sections.seed,
        "tuning": sections.tuning,
        "teaching": sections.teaching,
    }
