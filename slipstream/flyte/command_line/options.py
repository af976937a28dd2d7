"""Options of ``pyflyte run`` for this project's workflows: types, and an error for a missing value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from flytekit import StructuredDataset
from flytekit.core.artifact import ArtifactQuery
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.interaction.click_types import StructuredDatasetParamType

from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings


class SettingsParam(click.ParamType):
    """Click type of settings: JSON on the command line, or the name of a YAML or JSON file."""

    name = "JSON, or a YAML or JSON file"

    def __init__(self, settings: type[Settings]) -> None:
        self.settings = settings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, (self.settings, ArtifactQuery)):
            return value
        if not isinstance(value, str):  # from flytekit's --inputs-file
            return self.settings.from_dict(value)
        inline = value.lstrip().startswith(("{", "["))
        return self.settings.from_json(value) if inline else self.settings.from_file(Path(value))


class DatasetParam(StructuredDatasetParamType):
    """Click type of a Parquet file or directory; a local path must exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not FileAccessProvider.is_remote(value) and not Path(value).exists():
            option = param.opts[0] if param else "dataset"
            raise UserError(f"{option}: {value!r} does not exist; expected Parquet: a file, a directory or a URI")
        return super().convert(value, param, ctx)


def refine_option(option: click.Option, python_type: Any) -> None:
    """Give flytekit's option a type of this module, and an error for a missing required value.

    flytekit gives options a default of None, which hides from click that a value is missing.
    """
    if isinstance(python_type, type) and issubclass(python_type, Settings):
        option.type = SettingsParam(python_type)
    elif python_type is StructuredDataset:
        option.type = DatasetParam()
    convert = option.callback

    def convert_given(context: click.Context, param: click.Parameter, value: Any) -> Any:
        if param.required and value is None and not context.resilient_parsing:
            raise UserError(f"{param.opts[0]}: is missing; expected a value for it; --help lists all options")
        return convert(context, param, value) if convert else value

    option.callback = convert_given
