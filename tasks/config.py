"""Configuration sections per stage, and the Flyte tasks that return them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, NamedTuple

from flytekit import task

from slipstream.config import FineTuneConfig, RunConfig
from slipstream.flyte.homes import shared_address
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import BY_VALUE, map_errors, runs_locally
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.settings import to_dict
from slipstream.shared.source.config import DataConfig


def with_lasting_history(config: CollectivesConfig) -> CollectivesConfig:
    """Return the configuration with a benchmark history that outlives the pod.

    Unless the user configured another or the run is local, it is kept below Flyte's raw output.
    """
    if runs_locally() or config.history != CollectivesConfig().history:
        return config
    return replace(config, history=shared_address("history"))


class Sections(NamedTuple):
    """Sections of a configuration, as the inputs of cached tasks.

    ``model_code`` is a digest of the user's own model factory or of the base to fine-tune; "" for built-in models.
    """

    model: Annotated[ModelConfig, BY_VALUE]
    training: Annotated[TrainingConfig, BY_VALUE]
    export: Annotated[ExportConfig, BY_VALUE]
    collectives: Annotated[CollectivesConfig, BY_VALUE]
    model_code: str
    #: User's own model factory, the only untrusted code that may build trained models; or "".
    factory: str
    #: Largest number of parameters for an export to ONNX, checked before training; 0 if the model is compressed first.
    most_parameters: int
    #: Whole configuration, for the tasks of compression, which are not cached.
    config: Annotated[RunConfig, BY_VALUE]


@task(**stage_metadata("fingerprint"))
@map_errors
def with_base(base: str, config: FineTuneConfig) -> Annotated[RunConfig, BY_VALUE]:
    """Return the configuration for fine-tuning the language model at ``base``.

    The base's tokenizer is used unless another is configured.
    """
    if not base:
        raise UserError("--base: is empty; expected a directory, here or in a store, with the model to fine-tune")
    if config.model.base not in ("", base):
        raise UserError(f"model.base: {config.model.base} conflicts with --base {base}; expected only one of them")
    if runs_locally():
        from slipstream.shared.models.base.directory import base_address

        base = base_address(base)
    tokenizer = base if config.data.tokenizer == DataConfig().tokenizer else config.data.tokenizer
    data = replace(config.data, task="language", tokenizer=tokenizer)
    sections = {each.name: getattr(config, each.name) for each in fields(config)}
    return RunConfig(**{**sections, "data": data, "model": replace(config.model, base=base)})


@task(**stage_metadata("fingerprint"))
@map_errors
def read_config(config: RunConfig, method: str = "") -> Sections:
    """Return the sections of the configuration; not cached, since the code of a user's model may change."""
    return config_sections(config, method)


def config_sections(config: RunConfig, method: str = "") -> Sections:
    """Return the sections of the configuration; ``method`` ("prune" or "distil") overrides ``compression.method``.

    Raises ``UserError`` if the parallel layout does not fit the number of processes, or if a model to compress is
    sharded or has adapters.
    """
    from slipstream.shared.models.base.directory import ModelOrigin, with_lasting_addresses
    from slipstream.shared.models.factory_code import fingerprint_model

    config.model.check_base()
    if runs_locally():  # a relative path is of no use outside of a pod
        config = replace(config, model=with_lasting_addresses(config.model))
    origin = ModelOrigin(config.model)
    if config.model.base and config.data.task == "language":
        # Importing these takes half a second.
        from slipstream.pipeline.prepare.resolve import check_ids_of_base
        from slipstream.pipeline.train.checks import check_base

        check_base(origin, config.for_training(), config.data)
        check_ids_of_base(config.data.tokenizer, config.model.base)
    config = replace(config, collectives=with_lasting_history(config.collectives))
    placement, training, compression = current_profile().placement("train"), config.for_training(), config.compression
    if placement.processes:  # else as many as the machine has
        training.parallel.sizes(placement.nodes * placement.processes, placement.nodes)
    if method:
        compression = CompressionConfig.from_dict({**to_dict(compression), "method": method})
        config = replace(config, compression=compression)
    smaller = compression.method != "none"
    if smaller and training.parallel.divides:
        raise UserError(
            "training.parallel: a model that is compressed cannot be divided; expected no shard, pipeline or tensor, "
            "or compression.method null"
        )
    if smaller and not method and config.model.lora.rank:
        raise UserError(
            f"compression.method: {compression.method} cannot be combined with the adapters of model.lora; expected "
            "null, or a model.lora.rank of null, which trains the whole base"
        )
    return Sections(
        config.model,
        training,
        config.export,
        config.collectives,
        fingerprint_model(config.model) or origin.digest,
        config.model.factory,
        0 if smaller else config.export.most_parameters,
        config,
    )
