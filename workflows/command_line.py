"""What ``pyflyte run`` makes of ``--config`` and ``--dataset``: a mistake there is one line, not flytekit's traceback.

flytekit chooses the click type of an option in one function and has no registry to add to, so that function is wrapped:
for settings and datasets it answers with the types below, for all else as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from flytekit import StructuredDataset
from flytekit.core.artifact import ArtifactQuery
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.interaction import click_types
from flytekit.models.types import LiteralType

from slipstream.errors import UserError
from slipstream.settings import Settings
from workflows.backend_errors import explain_backend_errors


class SettingsParam(click.ParamType):
    """Settings as JSON on the command line, or as the name of a YAML or JSON file."""

    name = "JSON, or a YAML or JSON file"

    def __init__(self, settings: type[Settings]) -> None:
        self.settings = settings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, (self.settings, ArtifactQuery)):
            return value
        if not isinstance(value, str):  # a section of flytekit's own --inputs-file
            return self.settings.from_dict(value)
        inline = value.lstrip().startswith(("{", "["))
        return self.settings.from_json(value) if inline else self.settings.from_file(Path(value))


class DatasetParam(click_types.StructuredDatasetParamType):
    """A Parquet file or directory, which must be there if it is a local one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not FileAccessProvider.is_remote(value) and not Path(value).exists():
            option = param.opts[0] if param else "dataset"
            raise UserError(f"{option}: {value!r} does not exist; expected Parquet: a file, a directory or a URI")
        return super().convert(value, param, ctx)


flytekits_choice = click_types.literal_type_to_click_type


def click_type_of(literal_type: LiteralType, python_type: Any) -> click.ParamType:
    if isinstance(python_type, type) and issubclass(python_type, Settings):
        return SettingsParam(python_type)
    return DatasetParam() if python_type is StructuredDataset else flytekits_choice(literal_type, python_type)


def prepare_pyflyte() -> None:
    """Let ``pyflyte`` read options by these types and explain a backend's errors; calling it again changes nothing."""
    click_types.literal_type_to_click_type = click_type_of
    explain_backend_errors()
