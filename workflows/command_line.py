"""Extension of pyflyte's command line: options, nested conditionals, and errors of a Flyte backend.

A user's mistake is reported in one line; flytekit's traceback is only printed with ``-v``. flytekit has no registry for
click types, so its function that chooses an option's type is wrapped: settings and datasets get the types below. The
functions that create options and print exceptions are wrapped, too.
"""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb
from typing import Any

import click
from flytekit import StructuredDataset
from flytekit.clis.sdk_in_container import constants, run, utils
from flytekit.configuration import Config
from flytekit.core.artifact import ArtifactQuery
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.interaction import click_types
from flytekit.models.types import LiteralType

from slipstream.errors import UserError
from slipstream.flyte.remote.backend_errors import line_about
from slipstream.settings import Settings
from workflows.nested_conditions import allow_nested_conditions
from workflows.versions import version_by_structure
from workflows.waiting import one_line_of_a_failure


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


class DatasetParam(click_types.StructuredDatasetParamType):
    """Click type of a Parquet file or directory; a local path must exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not FileAccessProvider.is_remote(value) and not Path(value).exists():
            option = param.opts[0] if param else "dataset"
            raise UserError(f"{option}: {value!r} does not exist; expected Parquet: a file, a directory or a URI")
        return super().convert(value, param, ctx)


flytekits_option = run.to_click_option


def option_of(*arguments: Any, **named: Any) -> click.Option:
    """Return flytekit's option, with an error for a missing required value.

    flytekit gives options a default of None, which hides from click that a value is missing.
    """
    option = flytekits_option(*arguments, **named)
    convert = option.callback

    def convert_given(context: click.Context, param: click.Parameter, value: Any) -> Any:
        if param.required and value is None and not context.resilient_parsing:
            raise UserError(f"{param.opts[0]}: is missing; expected a value for it; --help lists all options")
        return convert(context, param, value) if convert else value

    option.callback = convert_given
    return option


flytekits_choice = click_types.literal_type_to_click_type


def click_type_of(literal_type: LiteralType, python_type: Any) -> click.ParamType:
    if isinstance(python_type, type) and issubclass(python_type, Settings):
        return SettingsParam(python_type)
    return DatasetParam() if python_type is StructuredDataset else flytekits_choice(literal_type, python_type)


def prepare_pyflyte() -> None:
    """Patch ``pyflyte`` for this project; calling it again changes nothing.

    Options get the click types above, errors of the backend and failed executions are explained in one line, versions
    of registered entities include their structure, and of a nested conditional only the chosen branch runs.
    """
    click_types.literal_type_to_click_type = click_type_of
    run.to_click_option = option_of
    explain_backend_errors()
    version_by_structure()
    one_line_of_a_failure()
    allow_nested_conditions()


#: Module of flytekit that makes all calls to the backend.
REMOTE = "flytekit.remote.remote"


def explain_backend_error(error: Exception, endpoint: str) -> UserError | None:
    """Return a one-line error if a call to the backend at ``endpoint`` caused ``error``, else None."""
    if not any(frame.f_globals.get("__name__") == REMOTE for frame, _ in walk_tb(error.__traceback__)):
        return None
    return line_about(error, endpoint)


def endpoint_of(context: click.Context | None) -> str:
    file = (context.obj or {}).get(constants.CTX_CONFIG_FILE) if context else None
    return Config.auto(file).platform.endpoint


flytekits_printer = utils.pretty_print_exception


def print_exception(error: Exception, verbosity: int = 1) -> None:
    """Raise ``UserError`` for errors that :func:`explain_backend_error` knows; let flytekit print others."""
    if verbosity == 0 and not isinstance(error, click.ClickException):
        explained = explain_backend_error(error, endpoint_of(click.get_current_context(silent=True)))
        if explained:
            raise explained from error
    flytekits_printer(error, verbosity)


def explain_backend_errors() -> None:
    utils.pretty_print_exception = print_exception
