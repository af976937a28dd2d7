"""Options of ``pyflyte run`` for this project's workflows: types, and an error for a missing value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flytekit import FlyteContextManager, LaunchPlan, StructuredDataset
from flytekit.configuration import SerializationSettings
from flytekit.core.artifact import ArtifactQuery
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.interaction.click_types import StructuredDatasetParamType
from flytekit.tools.serialize_helpers import get_registrable_entities
from google.protobuf.message import Message

from slipstream.config_values import combined, read_part
from slipstream.flyte.settings_type import from_client
from slipstream.operations.doctor.archive import workflow_nodes
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.settings import Settings, as_written, differences, is_settings, to_dict
from slipstream.shared.storage import STORES


class SettingsParam(click.ParamType):
    """Click type of a part of settings: a YAML or JSON file, JSON, or a single value."""

    name = "FILE, JSON or setting=value"

    def __init__(self, settings: type[Settings]) -> None:
        self.settings = settings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Settings):
            return to_dict(value)
        # Others are from flytekit's --inputs-file.
        return read_part(self.settings, value) if isinstance(value, str) else value


class DatasetParam(StructuredDatasetParamType):
    """Click type of Parquet; a local path must exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not FileAccessProvider.is_remote(value) and not Path(value).exists():
            option = param.opts[0] if param else "dataset"
            raise UserError(f"{option}: {value!r} does not exist; expected Parquet: a file, a directory or a URI")
        return super().convert(value, param, ctx)


def default_text(settings: type[Settings], default: Any) -> Any:
    """Return the default of an option as JSON.

    ``default`` is that of a Python function, or of a registered launch plan as text. The text of another
    release's settings is returned unchanged: an error unless the user gives a value.
    """
    if not default or isinstance(default, ArtifactQuery):
        return default
    try:
        value = default if isinstance(default, Settings) else from_client(settings, default)
    except UserError:
        return default
    return json.dumps(to_dict(value))


def describe_settings(option: click.Option, settings: type[Settings], description: str, default: Any) -> None:
    """Show no schema, and of the default what is changed."""
    option.default = default_text(settings, default)
    option.help = "; ".join(filter(None, [description, "may be given several times; docs/settings.md lists all"]))
    if isinstance(option.default, str):
        option.show_default = shown_default(settings, option.default)
        option.default = [option.default]


def shown_default(settings: type[Settings], text: str) -> str:
    try:
        changed = differences(as_written(from_client(settings, text)), as_written(settings()))
    except UserError:
        return text
    return json.dumps(changed) if changed else "all defaults"


#: Values in the example of a workflow's help.
EXAMPLES = {
    "data": "customers.csv",
    "target": "churned",
    "base": "models/qwen",
    "registry": "s3://bucket/registry",
    "output": "scores",
    "training_data": "customers.csv",
    "dataset": "customers.parquet",
}


def shorten_help(command: click.Command, module: str, entity: Any) -> None:
    """Add an example; hide what a file imports, and workflows without documented arguments."""
    described, documented, _ = (entity.__doc__ or "").partition("Args:")
    own = entity.name == f"{module}.{command.name}" and (documented or not command.params)
    command.hidden = not (own or isinstance(entity, LaunchPlan))
    description = " ".join(described.replace("``", "").split())
    names = {each.name for each in command.params if each.required}
    known = EXAMPLES | ({"data": "documents"} if "base" in names else {})
    known |= {"data": "prepared", "model": "trained"} if "model" in names else {}
    given = [f"--{each.name} {known[each.name]}" for each in command.params if each.name in known]
    path = module.replace(".", "/")
    command.help = f"{description}\n\nExample: pyflyte run {path}.py {' '.join([command.name or '', *given])}"


def refine_option(option: click.Option, python_type: Any) -> None:
    """Give flytekit's option a type of this module, and an error for a missing required value."""
    # flytekit gives options a default of None, which hides from click that a value is missing.
    if is_settings(python_type):
        option.type, option.multiple = SettingsParam(python_type), not isinstance(option.default, ArtifactQuery)
    elif python_type is StructuredDataset:
        option.type = DatasetParam()
    convert = option.callback

    def convert_given(context: click.Context, param: click.Parameter, value: Any) -> Any:
        if param.required and value is None and not context.resilient_parsing:
            raise UserError(f"{param.opts[0]}: is missing; expected a value for it; --help lists all options")
        if param.name in TO_UPLOAD and isinstance(value, str) and getattr(context.obj, "is_remote", False):
            refuse_local_path(param.opts[0], value, TO_UPLOAD[param.name])
        if is_settings(python_type) and isinstance(value, tuple):
            given = context.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT
            value = combined(python_type, value) if given else python_type.from_dict(*value) if value else None
        return convert(context, param, value) if convert else value

    option.callback = convert_given


#: What to do for the addresses among a workflow's inputs. flytekit itself uploads directories and tables.
TO_UPLOAD = {
    "base": "upload the directory with config.json, the safetensors and the tokenizer",
    "data": "upload the files",
    "training_data": "upload the files",
    "registry": "upload the registry, or let the first promotion start one there",
    "output": "scores are written there",
}


def refuse_local_path(option: str, given: str, what: str) -> None:
    """Raise ``UserError`` for a path that no pod can read: neither in a store nor on a volume of the profile."""
    profile = current_profile()
    volumes = [volume.path for placement in (profile.default, *profile.stages.values()) for volume in placement.volumes]
    mounted = any(f"{given}/".startswith(f"{path}/") for path in volumes)
    if given and not given.startswith(STORES) and not mounted:
        raise UserError(
            f"{option}: {given}: pods cannot read this machine's disk or cache; expected an address in a store (s3://, "
            f"gs://, abfs://) or a path on a volume of the profile: {what}"
        )


# flytekit's version is a hash of the code, the image and its own settings. The same code creates other tasks and launch
# plans under another profile or other schedules, on a machine with GPUs or with another torch, and Flyte refuses those
# under an existing version. So the entities are first serialised without a version and added to the hash.
def structure_digest(settings: SerializationSettings) -> str:
    """Return a digest of the loaded tasks, workflows and launch plans."""
    serialising = FlyteContextManager.current_context().with_serialization_settings(replace(settings, version=""))
    with FlyteContextManager.with_context(serialising) as context:
        entities = [entity.to_flyte_idl() for entity in get_registrable_entities(context)]
    return hashlib.sha256(b"".join(sorted(map(canonical_bytes, entities)))).hexdigest()


def canonical_bytes(spec: Message) -> bytes:
    """Serialise equal entities to the same bytes, although flytekit lists upstream nodes in random order."""
    if isinstance(spec, WorkflowSpec):
        for template in (spec.template, *spec.sub_workflows):
            for _, node in workflow_nodes(template):
                node.upstream_node_ids.sort()
    return spec.SerializeToString(deterministic=True)
