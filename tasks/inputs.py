"""First tasks of workflows, which find and check the user's inputs before any work starts.

They are not cached, since the bytes at an address and the code of a model may change. They run with the export's
placement to find its machine, which is part of the export's cache key, as it decides which variant is fastest.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Part, Prepared, Trained
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import BY_VALUE, local_path, map_errors, rows_path, runs_locally
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact, in_run
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import measuring_machine
from slipstream.shared.models.config import BUILT_IN, BuiltIn, ModelConfig
from slipstream.shared.settings import unknown_setting
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.dates import dated_address
from slipstream.shared.storage import STORES
from tasks.config import config_sections
from tasks.prepare import list_and_divide, resolved_source

if TYPE_CHECKING:
    from slipstream.shared.source.resolved import Kind

#: Built-in model by kind of raw data, for kinds other than tables.
FITTING: dict[Kind, BuiltIn] = {"images": "resnet", "language": "transformer"}


class RunInputs(NamedTuple):
    """Listed raw data (:class:`tasks.prepare.Listed`), :class:`tasks.config.Sections`, and the machine."""

    listing: Part
    source: str
    division: str
    texts: list[Part]
    data: Annotated[DataConfig, BY_VALUE]
    model: Annotated[ModelConfig, BY_VALUE]
    training: Annotated[TrainingConfig, BY_VALUE]
    export: Annotated[ExportConfig, BY_VALUE]
    collectives: Annotated[CollectivesConfig, BY_VALUE]
    model_code: str
    factory: str
    most_parameters: int
    config: Annotated[RunConfig, BY_VALUE]
    machine: str


@task(**stage_metadata("export", cached=False))
@map_errors
def resolve_inputs(data: str, target: str, config: RunConfig, kickoff: datetime | None) -> RunInputs:
    """Find and check the raw data, all settings and the machine of the export."""
    sections = config_sections(config)
    listed = list_and_divide(dated_address("data", data, kickoff), target, config.data)
    check_model(FITTING.get(resolved_source(listed.listing).kind, "mlp"), config)
    found = (*listed, *sections, measuring_machine())
    return RunInputs(*found)


def check_model(fitting: BuiltIn, config: RunConfig) -> None:
    """Raise ``UserError`` for a model that does not fit the data, has wrong arguments or is too large for its export.

    Everything that is known without the data's content is refused here, before preparation.
    """
    model, compression = config.model, config.compression
    name = model.name_for(fitting)
    if config.sweep.space:
        check_space(config, name)
    students = compression.students if compression.method == "distil" else []
    if model.arguments or model.factory or students:
        # Importing this takes a second or two.
        from slipstream.shared.models.factory import check_without_data

        check_without_data(model, name)
        for student in students:
            try:
                check_without_data(replace(model, arguments={**model.arguments, **student}), name)
            except UserError as error:
                raise UserError(f"compression.students: {error.message}") from None
    exported = compression.method == "none"
    if exported and (model.arguments or config.export.most_parameters < ExportConfig().most_parameters):
        from slipstream.pipeline.export.weights_alone import check_for_any_data

        check_for_any_data(model, name, config.export)


def check_space(config: RunConfig, name: str) -> None:
    """Raise ``UserError`` for a search space with settings that do not exist or values that they refuse."""
    from slipstream.pipeline.sweep.space import FREE, searched_parameters

    paths = [each.path for each in searched_parameters(config)]
    if name not in BUILT_IN or "model.name" in paths:
        return
    for path in paths:
        if path.startswith(f"{FREE}."):
            from slipstream.shared.models.factory import argument_kinds

            names, argument = argument_kinds(name), path.split(".")[2]
            if argument not in names:
                raise UserError(f"sweep.space: {unknown_setting(FREE, argument, list(names))}")


class ModelInputs(NamedTuple):
    """Trained model and prepared data of the user, and a description of the machine."""

    trained: Trained
    prepared: Prepared
    machine: str


@task(**stage_metadata("export", cached=False))
@map_errors
def open_inputs(model: str, data: str) -> ModelInputs:
    """Find and check a trained model and prepared data at two addresses; describe the machine of the export.

    Raises ``UserError`` if an address does not hold the expected artifact.
    """
    return ModelInputs(
        open_given("--model", model, "train", "a trained model, as runs/… or .slipstream/train/… holds one"),
        open_given("--data", data, "prepare", "prepared data, as runs/… or .slipstream/prepare/… hold it"),
        measuring_machine(),
    )


def open_given(option: str, address: str, kind: str, expected: str) -> FlyteDirectory:
    """Return the artifact of the stage ``kind`` at an address, after checking its manifest.

    Local runs download a trained model from a store, but only those rows of prepared data that are read.
    """
    if not address.startswith(STORES):
        address = str(in_run(Path(address).absolute(), kind))
    found = FlyteDirectory(address)
    path = rows_path(found) if kind == "prepare" else local_path(found) if address.startswith(STORES) else Path(address)
    try:
        Artifact.open(path, kind)
    except DamagedArtifact as error:
        raise UserError(f"{option}: {address} is not {expected}: {error.message}") from None
    return FlyteDirectory(str(path.absolute())) if runs_locally() else found
