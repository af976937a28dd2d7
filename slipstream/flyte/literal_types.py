"""Faster flytekit type descriptions of dataclasses: cached, without compiled defaults, and skipped in pods.

flytekit 1.16 builds the JSON schema of a dataclass whenever a signature mentions it. mashumaro compiles a class for
every default value to get its JSON form, and evaluates all annotations of a class for every field. Importing this
project's workflows took 15 s: 13 s for schemas, 0.5 s for mashumaro itself.

Only the process that registers a task sends its descriptions to Flyte. A pod imports the task too, but converts values
by the classes alone; the unused descriptions would take up to half of its CPU time outside the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import DataclassTransformer
from flytekit.models.types import LiteralType, SimpleType

PLAIN = (bool, int, float, str, type(None))


def describe_once() -> None:
    """Cache type descriptions in this process. A description depends only on its type and is never changed."""
    anew = DataclassTransformer.get_literal_type
    if not in_a_pod():
        describe_fast()
    remembered = cache(anew)

    def get_literal_type(transformer: DataclassTransformer, of: Any) -> LiteralType:
        if in_a_pod():
            return LiteralType(simple=SimpleType.STRUCT)
        try:
            hash(of)
        except TypeError:  # annotated by a dictionary or the like
            return anew(transformer, of)
        return remembered(transformer, of)

    DataclassTransformer.get_literal_type = get_literal_type


def in_a_pod() -> bool:
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is ExecutionState.Mode.TASK_EXECUTION


def describe_fast() -> None:
    # Importing these takes as long as importing most tasks.
    import mashumaro.core.meta.code.builder as fields_of_class
    import mashumaro.jsonschema.schema as json_schema

    json_schema._default = with_plain_defaults(json_schema._default)
    fields_of_class.get_annotations = cache(fields_of_class.get_annotations)  # type: ignore[assignment]


def with_plain_defaults(compiled: Callable[..., object]) -> Callable[..., object]:
    """Wrap mashumaro's function that converts a default to JSON; call it only if the default is not JSON already."""

    def default(of: object, value: object, config: object) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        return value if is_json(value) else compiled(of, value, config)

    return default


def is_json(value: object) -> bool:
    match value:
        case dict():
            return all(type(name) is str and is_json(item) for name, item in value.items())
        case list():
            return all(map(is_json, value))
    return type(value) in PLAIN
