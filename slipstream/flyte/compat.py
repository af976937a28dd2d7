"""Patches of flytekit, its PyTorch plugin, mashumaro and torch's launcher.

Every :class:`Patch` names the versions it is for and what upstream does. ``tests/registration/test_compat.py`` fails
when an installed version is another, or when upstream no longer needs a patch.

- :func:`patch_tasks` is called at the import of :mod:`slipstream.flyte`, since a pod offers no other hook.
- :func:`patch_command_line` is called by the modules of ``workflows/``, which ``pyflyte`` loads.
- The other patches are only in place while a type of this project is described, or while one of its tasks starts
  workers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from threading import RLock
from typing import Annotated, Any, get_args, get_origin

from slipstream.flyte.open_settings import in_a_pod
from slipstream.shared.errors import UserError
from slipstream.shared.settings import is_settings

#: Packages of this project. Types, tasks and workflows of others keep flytekit's behaviour.
OURS = ("slipstream", "tasks", "workflows")
FLYTEKIT, PLUGIN, MASHUMARO, TORCH = (
    "flytekit>=1.16.31,<1.17",
    "flytekitplugins-kfpytorch>=1.16.30,<1.17",
    "mashumaro>=3.15,<4",
    "torch>=2.11",
)
#: Wraps an original function.
Wrapper = Callable[[Any], Any]
LOCK = RLock()
#: Originals of the patches in place, by their places.
ORIGINALS: dict[str, Any] = {}


@dataclass(frozen=True)
class Patch:
    """Attribute of another library that this project replaces."""

    #: ``module:attribute`` or ``module:Class.attribute``.
    place: str
    #: Requirements on the versions that it is for.
    versions: tuple[str, ...]
    #: What upstream does, or its issue.
    upstream: str

    def apply(self, wrapper: Wrapper) -> None:
        """Replace the attribute by the wrapped original, unless it is replaced already."""
        with LOCK:
            if self.place not in ORIGINALS:
                owner, name = self._owner()
                ORIGINALS[self.place] = getattr(owner, name)
                setattr(owner, name, wrapper(ORIGINALS[self.place]))

    @contextmanager
    def applied(self, wrapper: Wrapper) -> Iterator[None]:
        """Replace the attribute in the block."""
        with LOCK:
            outermost = self.place not in ORIGINALS
            self.apply(wrapper)
        try:
            yield
        finally:
            if outermost:
                with LOCK:
                    setattr(*self._owner(), ORIGINALS.pop(self.place))

    def _owner(self) -> tuple[Any, str]:
        module, _, path = self.place.partition(":")
        *classes, name = path.split(".")
        return reduce(getattr, classes, importlib.import_module(module)), name


DESCRIPTIONS = Patch(
    "flytekit.core.type_engine:DataclassTransformer.get_literal_type",
    (FLYTEKIT,),
    "builds the JSON schema of a dataclass whenever a signature mentions it, also in pods, which do not use it: "
    "importing this project's workflows took 15 s",
)
DEFAULTS = Patch(
    "mashumaro.jsonschema.schema:_default",
    (MASHUMARO,),
    "compiles a class for every default value of a field to get its JSON form",
)
ANNOTATIONS = Patch(
    "mashumaro.core.meta.code.builder:get_annotations",
    (MASHUMARO,),
    "evaluates all annotations of a class for every one of its fields",
)
ERROR_TEXT = Patch(
    "flytekit.bin.entrypoint:get_traceback_str",
    (FLYTEKIT,),
    "puts stack frames first into error.pb, whose start Flyte's console shows, and logs further lines after it",
)
HITS = Patch(
    "flytekit.core.local_cache:LocalTaskCache.get",
    (FLYTEKIT,),
    "a hit of the local cache runs no code of the task, so nothing verifies the files or reports the reuse; local runs "
    "of this project use slipstream/shared/artifacts/workspaces.py",
)
RESULTS = Patch(
    "flytekit.core.local_cache:LocalTaskCache.set",
    (FLYTEKIT,),
    "keeps the address of a directory, not its files",
)
LAUNCHER = Patch(
    "torch.distributed.launcher.api:elastic_launch",
    (TORCH, PLUGIN),
    "the plugin starts workers by spawn, which imports torch and flytekit in every worker (5 s), or by fork with all "
    "threads of the agent; it has no setting for forkserver",
)
OPTIONS = Patch(
    "flytekit.clis.sdk_in_container.run:to_click_option",
    (FLYTEKIT,),
    "has no registry for click types, ignores unknown keys of a dataclass, passes None for a missing option, and "
    "encodes the default of a launch plan, which it holds as text, as if it were a dataclass",
)
HELP = Patch(
    "flytekit.clis.sdk_in_container.run:WorkflowCommand._create_command",
    (FLYTEKIT,),
    "lists all tasks and workflows that a file imports, and shows arguments in the description again",
)
BACKEND_ERRORS = Patch(
    "flytekit.clis.sdk_in_container.utils:pretty_print_exception",
    (FLYTEKIT,),
    "prints a traceback when Flyte cannot be reached or refuses a call",
)
REMOTE_DEFAULTS = Patch(
    "flytekit.clis.sdk_in_container.run:DynamicEntityLaunchCommand._get_params",
    (FLYTEKIT,),
    "gives the options of remote-workflow no defaults, although the workflow's launch plan has them",
)
VERSION = Patch(
    "flytekit.remote:FlyteRemote._version_from_hash",
    (FLYTEKIT,),
    "hashes the code and the image, but not the structure of the entities, which follows from profile and schedules",
)
WAITING = Patch(
    "flytekit.clis.sdk_in_container.run:run_remote",
    (FLYTEKIT,),
    "prints the task's traceback when an execution that it waits for failed",
)
NESTED_CONDITIONS = Patch(
    "flytekit.core.context_manager:FlyteContext.Builder.enter_conditional_section",
    (FLYTEKIT,),
    "in local runs an inner conditional shares the outer one's state: skipped cases run, and later nodes do not",
)


def patch_tasks() -> None:
    """Apply the patches that tasks need in every process, once."""
    DESCRIPTIONS.apply(described_once)
    ERROR_TEXT.apply(cause_first)
    HITS.apply(no_local_hits)
    RESULTS.apply(no_local_results)
    keep_lazy()


def patch_command_line() -> None:
    """Apply the patches of ``pyflyte``, once."""
    OPTIONS.apply(refined_options)
    HELP.apply(short_help)
    REMOTE_DEFAULTS.apply(defaults_of_plan)
    BACKEND_ERRORS.apply(explained_backend_errors)
    VERSION.apply(versioned_by_structure)
    WAITING.apply(one_line_of_a_failure)
    NESTED_CONDITIONS.apply(own_state)


def patch_loaded_command_line() -> None:
    """Apply the patches of ``pyflyte`` if it runs a registered entity of this project, for which it loads no module."""
    if "flytekit.clis.sdk_in_container.run" in sys.modules:
        patch_command_line()


def is_ours(of: Any) -> bool:
    """Return True for a class of this project, annotated or not."""
    if get_origin(of) is Annotated:
        of = get_args(of)[0]
    return in_ours(getattr(of, "__module__", ""))


def in_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


# Descriptions of types


def described_once(original: Any) -> Any:
    """Cache descriptions of this project's dataclasses, and skip them in pods, which convert values by the classes."""
    from flytekit.models.types import LiteralType, SimpleType

    def describe(transformer: Any, of: Any) -> LiteralType:
        with fast_descriptions():
            described = original(transformer, of)
        add_types(described.metadata)
        return described

    remembered = cache(describe)

    def get_literal_type(transformer: Any, of: Any) -> LiteralType:
        if not is_ours(of):
            return original(transformer, of)
        if in_a_pod():
            return LiteralType(simple=SimpleType.STRUCT)
        try:
            hash(of)
        except TypeError:  # annotated by a dictionary or the like
            return describe(transformer, of)
        return remembered(transformer, of)

    return get_literal_type


def add_types(schema: Any) -> None:
    """Add the type of enumerations, which mashumaro leaves out, to a JSON schema of a dataclass."""
    for node in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        add_types(node)
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        schema["type"] = "string"


@contextmanager
def fast_descriptions() -> Iterator[None]:
    """Make mashumaro's descriptions fast in the block, which holds a lock."""
    with LOCK, DEFAULTS.applied(plain_defaults), ANNOTATIONS.applied(cached_annotations):
        yield


@cache
def cached_annotations(original: Any) -> Any:
    return cache(original)


def plain_defaults(original: Any) -> Any:
    """Call mashumaro's conversion of a default to JSON only if the default is not JSON already."""

    def default(of: object, value: object, config: object) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        return value if is_json(value) else original(of, value, config)

    return default


def is_json(value: object) -> bool:
    match value:
        case dict():
            return all(type(name) is str and is_json(item) for name, item in value.items())
        case list():
            return all(map(is_json, value))
    return type(value) in (bool, int, float, str, type(None))


# Tasks


def cause_first(original: Any) -> Any:
    """Write the cause first in a pod of this project's tasks."""
    from slipstream.flyte.last_line import message_of
    from slipstream.flyte.metadata import STAGE

    def get_traceback_str(error: Exception) -> str:
        return message_of(error, original(error)) if STAGE in os.environ else original(error)

    return get_traceback_str


def no_local_hits(original: Any) -> Any:
    def get(task_name: str, *key: Any) -> Any:
        return None if in_ours(task_name) else original(task_name, *key)

    return staticmethod(get)


def no_local_results(original: Any) -> Any:
    def keep(task_name: str, *entry: Any) -> None:
        if not in_ours(task_name):
            original(task_name, *entry)

    return staticmethod(keep)


Lazy: Any = importlib.util._LazyModule  # type: ignore[attr-defined]
#: Libraries that flytekit imports at the first access to any attribute. torch reads the ``__file__`` of every module
#: while it registers operators, which loads them: half a second and 35 MB per process.
LAZY = ("joblib", "pandas", "pyarrow")
#: Attributes that can be read without loading the module.
KNOWN = ("__class__", "__file__", "__loader__", "__name__", "__spec__")


class _LazyModule(Lazy):  # flytekit knows lazy modules by the name of their class
    """Module proxy that exposes the attributes ``KNOWN`` without loading."""

    def __getattribute__(self, name: str) -> Any:
        if name in KNOWN:
            return object.__getattribute__(self, name)
        object.__setattr__(self, "__class__", Lazy)
        return getattr(self, name)


def keep_lazy() -> None:
    """Convert flytekit's lazy modules to the proxy."""
    for module in map(sys.modules.get, LAZY):
        if type(module) is Lazy:
            object.__setattr__(module, "__class__", _LazyModule)


# The command line


def refined_options(original: Any) -> Any:
    from slipstream.flyte.command_line.options import describe_settings, refine_option

    def to_click_option(
        context: Any, flyte: Any, name: str, variable: Any, python_type: Any, default: Any, *more: Any
    ) -> Any:
        if is_settings(python_type):
            option = original(context, flyte, name, variable, python_type, None, *more)
            describe_settings(option, python_type, variable.description, default)
        else:
            option = original(context, flyte, name, variable, python_type, default, *more)
        if is_settings(python_type) or in_ours(context.obj.computed_params.module or ""):
            refine_option(option, python_type)
        return option

    return to_click_option


def short_help(original: Any) -> Any:
    from slipstream.flyte.command_line.options import shorten_help

    def create_command(group: Any, context: Any, name: str, level: Any, entity: Any, kind: str) -> Any:
        command = original(group, context, name, level, entity, kind)
        if in_ours(level.computed_params.module):
            shorten_help(command, level.computed_params.module, entity)
        return command

    return create_command


def defaults_of_plan(original: Any) -> Any:
    """Give a registered workflow with settings its plan's defaults, and the options of a local one."""
    from slipstream.flyte.command_line.options import refine_option

    def get_params(command: Any, context: Any, inputs: Any, types: Any, fixed: Any = None, defaults: Any = None) -> Any:
        if not any(map(is_settings, types.values())):
            return original(command, context, inputs, types, fixed, defaults)
        if command._launcher == command.WORKFLOW_LAUNCHER:
            name, remote = command._fetch_entity(context).id, context.obj.remote_instance()
            plan = remote.fetch_launch_plan(name.project, name.domain, name.name, name.version)
            defaults = plan.default_inputs.parameters
        options = original(command, context, inputs, types, fixed, defaults)
        for option in options:
            if not is_settings(types[option.name]):  # settings are refined already
                refine_option(option, types[option.name])
        return options

    return get_params


def explained_backend_errors(original: Any) -> Any:
    import click

    from slipstream.flyte.remote.backend import explain_remote_error

    def pretty_print_exception(error: Exception, verbosity: int = 1) -> None:
        if verbosity == 0 and not isinstance(error, click.ClickException):
            explained = explain_remote_error(error, click.get_current_context(silent=True))
            if explained:
                raise explained from error
        original(error, verbosity)

    return pretty_print_exception


def versioned_by_structure(original: Any) -> Any:
    from slipstream.flyte.command_line.options import structure_digest

    def version_of(code: bytes, settings: Any, default_inputs: dict[str, Any] | None = None, *context: str) -> str:
        return original(code, settings, default_inputs, *context, structure_digest(settings))

    return staticmethod(version_of)


def one_line_of_a_failure(original: Any) -> Any:
    """Raise ``UserError`` if the awaited execution failed; with ``-v`` flytekit prints the traceback."""
    from slipstream.flyte.last_line import cause_of

    def run_remote(remote: Any, *what: Any, **how: Any) -> None:
        wait, (*_, options) = remote.wait, what

        def wait_for(execution: Any, *arguments: Any, **named: Any) -> Any:
            ended = wait(execution, *arguments, **named)
            why = cause_of(ended)
            if why and not options.verbose:
                raise UserError(f"execution {ended.id.name} failed: {why}")
            return ended

        remote.wait = wait_for
        original(remote, *what, **how)

    return run_remote


def own_state(original: Any) -> Any:
    """Enter a conditional with a separate execution state, in which no case is chosen yet."""
    from flytekit.core.context_manager import BranchEvalMode

    def enter_conditional_section(builder: Any) -> Any:
        state = builder.execution_state
        if state and state.is_local_execution():
            builder.execution_state = state.with_params(branch_eval_mode=BranchEvalMode.BRANCH_SKIPPED)
        return original(builder)

    return enter_conditional_section
