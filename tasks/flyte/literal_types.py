"""flytekit's description of a dataclass, made once, without a class for each default, and not at all in a pod.

For every mention of a dataclass in the signature of a task or workflow flytekit 1.16 builds its JSON schema anew, and
mashumaro makes and compiles a class for each default in it, to find out how that is written in JSON, and evaluates all
annotations of a class for each of its fields. Importing the workflows of this project took 15 s, of which 13 were the
first, and half a second of what is left the others.

Who registers a task hands its descriptions to Flyte. A pod imports the task again, converts values by the classes
alone, and would spend up to half of its CPU time outside of its engine on descriptions that nobody reads.
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
    """From now on, in this process. A description depends on nothing but the type, and nobody changes one."""
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
    """Whether this process runs a task that was registered before."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is ExecutionState.Mode.TASK_EXECUTION


def describe_fast() -> None:
    # Importing them takes as long as importing most tasks.
    import mashumaro.core.meta.code.builder as fields_of_class
    import mashumaro.jsonschema.schema as json_schema

    json_schema._default = with_plain_defaults(json_schema._default)
    fields_of_class.get_annotations = cache(fields_of_class.get_annotations)  # type: ignore[assignment]


def with_plain_defaults(compiled: Callable[..., object]) -> Callable[..., object]:
    """mashumaro's function for the JSON of a default, which is asked only where the value is not JSON already."""

    def default(of: object, value: object, config: object) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        return value if is_json(value) else compiled(of, value, config)

    return default


def is_json(value: object) -> bool:
    """Whether JSON holds the value as it is."""
    match value:
        case dict():
            return all(type(name) is str and is_json(item) for name, item in value.items())
        case list():
            return all(map(is_json, value))
    return type(value) in PLAIN
