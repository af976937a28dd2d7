"""The Flyte task of the export."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.artifacts.format import Artifact, DamagedArtifact
from slipstream.artifacts.prepared.data import KIND as PREPARED
from slipstream.artifacts.results.training import KIND as TRAINED
from slipstream.artifacts.versions import code_version
from slipstream.errors import UserError
from slipstream.export.config import ExportConfig
from slipstream.machine.description import measuring_machine
from slipstream.settings import to_dict
from slipstream.storage import STORES
from tasks.flyte.artifact_types import MadeExported, Prepared, Trained
from tasks.flyte.metadata import on
from tasks.flyte.stage import local_path, map_errors, rows_path, run_stage, runs_locally


class Inputs(NamedTuple):
    """A trained model and prepared data that a user named."""

    trained: Trained
    prepared: Prepared


@task(**on("fingerprint"))
@map_errors
def open_inputs(model: str, data: str) -> Inputs:
    """The artifacts at two addresses. Never cached: new bytes behind an address are new work.

    Raises ``UserError`` if one of them is not what it should be.
    """
    return Inputs(
        given("--model", model, TRAINED, "a trained model, as .slipstream/train/… or training's output holds one"),
        given("--data", data, PREPARED, "prepared data, as runs/…/prepared or .slipstream/prepare/… hold it"),
    )


def given(option: str, address: str, kind: str, expected: str) -> FlyteDirectory:
    """The artifact at an address, its manifest checked; on one machine with a store's files fetched, or rows as they
    are read."""
    found = FlyteDirectory(address) if address.startswith(STORES) else FlyteDirectory(str(Path(address).absolute()))
    path = rows_path(found) if kind == PREPARED else local_path(found) if address.startswith(STORES) else Path(address)
    try:
        Artifact.open(path, kind)
    except DamagedArtifact as error:
        raise UserError(f"{option}: {address} is not {expected}: {error.message}") from None
    return FlyteDirectory(str(path.absolute())) if runs_locally() else found


@task(**on("export", cached=False))
@map_errors
def describe_machine() -> str:
    """The machine that the export's placement gives: which variant wins depends on it, so it belongs to the key of the
    cache. A pod of another type of node has another."""
    return measuring_machine()


@task(**on("export"))
@map_errors
def export(
    trained: Trained, prepared: Prepared, config: ExportConfig, machine: str = "", factory: str = "", code: str = ""
) -> MadeExported:
    """Export the trained model to ONNX, quantise it, measure the variants and choose one. ``machine`` is what
    :func:`describe_machine` says of where this runs, ``factory`` the one that the user's configuration names, if
    any, and ``code`` an input so that another state of its code makes another export of the same weights."""

    def make(directory: Path, key: str) -> Artifact:
        from slipstream.artifacts.prepared.streamed import open_prepared
        from slipstream.export import engine
        from slipstream.models.trained import TrainedModel

        model, data = TrainedModel.open(local_path(trained), factory), open_prepared(rows_path(prepared))
        made_by = {
            "config": to_dict(config),
            "code": code_version("export"),
            "trained": model.artifact.fingerprint,
            "prepared": data.artifact.fingerprint,
            "model_code": code,
        }
        return engine.export(directory, model, data, config, made_by)

    inputs = {"trained": trained, "prepared": prepared, "config": config, "factory": factory, "code": code}
    return MadeExported(*run_stage("export", inputs, make))
