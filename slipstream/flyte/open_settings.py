"""Integers in settings of any type that a client sent as floats.

A protobuf Struct has no integers. Which of its numbers are integers follows from the parameter that they are for: an
argument of the model's factory, or a setting with a type.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.shared.models.config import BUILT_IN
from slipstream.shared.settings import is_settings, kinds_of, with_integers

#: Prefix of paths to arguments of the model's factory.
ARGUMENTS = "model.arguments."


def with_whole_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with integers in ``model.arguments``, ``compression.students`` and ``sweep.space``.

    Values that are JSON text are left as they are.
    """
    found = dict(data)
    name = section(data, "model").get("name", "auto")

    def convert(of: str, setting: str, change: Callable[[Any], Any]) -> None:
        given = section(data, of).get(setting)
        if has_integral_float(given):
            found[of] = {**found[of], setting: change(given)}

    convert("model", "arguments", lambda given: whole_values(name, given, ARGUMENTS))
    convert("compression", "students", lambda given: whole_students(name, given))
    convert("sweep", "space", lambda given: whole_values(name, given))
    return found


def whole_students(name: Any, students: Any) -> Any:
    return [whole_values(name, each, ARGUMENTS) for each in students] if isinstance(students, list) else students


def section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def has_integral_float(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(has_integral_float, value.values()))
    if isinstance(value, list):
        return any(map(has_integral_float, value))
    return isinstance(value, float) and value.is_integer()


def whole_values(name: Any, values: Any, prefix: str = "") -> Any:
    """Return values by setting, with integers where the settings, or the arguments of the model ``name``, are integers.

    The path of a setting is its name after ``prefix``.
    """
    if not isinstance(values, Mapping):
        return values
    kinds = argument_kinds(name)
    return {key: whole_setting(kinds, f"{prefix}{key}", value) for key, value in values.items()}


def argument_kinds(name: Any) -> dict[str, tuple[object, object]]:
    """Return types and defaults of the arguments of the model ``name``; none of a user's factory outside of pods.

    The factory is the user's own code, which a client that only shows an execution must not run.
    """
    if name not in ("auto", *BUILT_IN) and not (isinstance(name, str) and ":" in name and in_a_pod()):
        return {}
    # Importing this takes a second or two.
    return importlib.import_module("slipstream.shared.models.factory").argument_kinds(name)


def whole_setting(arguments: Mapping[str, tuple[object, object]], path: str, value: Any) -> Any:
    """Return values of the setting at ``path``; ``arguments`` are those of the model, by name."""
    if not has_integral_float(value):
        return value
    if path.startswith(ARGUMENTS):
        first, *below = path.removeprefix(ARGUMENTS).split(".")
        kind, default = arguments.get(first, (None, None))
    else:
        from slipstream.config import RunConfig

        kind, default, below = RunConfig, None, path.split(".")
    for step in below:
        kind, default = kinds_of(kind).get(step) if is_settings(kind) else None, None
    return with_integers(value, kind, default)


def in_a_pod() -> bool:
    from flytekit import FlyteContextManager
    from flytekit.core.context_manager import ExecutionState

    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is ExecutionState.Mode.TASK_EXECUTION
