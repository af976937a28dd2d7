"""Flyte type of settings: whatever client sent them, they are read and checked like a user's file.

Clients encode a dataclass differently. ``pyflyte`` and ``FlyteRemote`` send MessagePack; the console and ``flytectl``
send a protobuf Struct, in which every number is a float. flytekit's own transformer for dataclasses ignores unknown
keys, rounds floats to integers, and rebuilds a class without defaults from the type of a registered interface.

Settings of any type, such as ``model.arguments``, are JSON text inside a literal, so no client changes their numbers. A
user may write them as a mapping in a Struct; :mod:`slipstream.flyte.open_settings` converts those.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgpack
from flytekit import FlyteContext
from flytekit.core.constants import CACHE_KEY_METADATA, MESSAGEPACK, SERIALIZATION_FORMAT
from flytekit.core.type_engine import TypeEngine, TypeTransformer, TypeTransformerFailedError
from flytekit.models.annotation import TypeAnnotation
from flytekit.models.literals import Binary, Literal, Scalar
from flytekit.models.types import LiteralType, SimpleType, TypeStructure
from google.protobuf.json_format import MessageToDict, SerializeToJsonError

from slipstream.flyte.open_settings import in_a_pod, with_whole_arguments
from slipstream.shared.errors import UserError
from slipstream.shared.settings import (
    Schema,
    Settings,
    each_once,
    nested_classes,
    open_fields,
    path_of,
    portable,
    resolved,
    settings_schema,
    subclasses,
    to_dict,
)
from slipstream.shared.spelling import users_schema

#: Start of the tag by which the type of a registered interface names its class.
TAG = "slipstream."
#: Keys of pydantic's JSON schemas that registered types keep, besides those of children.
KEPT = ("type", "enum", "const", "default")


class SettingsTransformer(TypeTransformer[Settings]):
    """flytekit type transformer for all subclasses of :class:`Settings`.

    ``on_guess`` is called whenever a client asks for the class of a registered type.
    """

    def __init__(self, on_guess: Callable[[], None]) -> None:
        super().__init__("slipstream settings", Settings, enable_type_assertions=False)
        self.on_guess = on_guess

    def get_literal_type(self, t: Any) -> LiteralType:
        # Pods convert values by the classes, and do without the schema.
        return LiteralType(simple=SimpleType.STRUCT) if in_a_pod() else described_type(plain_class(t))

    def guess_python_type(self, literal_type: LiteralType) -> type[Settings]:
        tag = literal_type.structure.tag if literal_type.structure else ""
        if not tag.startswith(TAG) or (found := known_classes().get(tag.removeprefix(TAG))) is None:
            raise ValueError(f"{literal_type} is not of settings")
        self.on_guess()
        return found

    def to_literal(self, ctx: FlyteContext, python_val: Any, python_type: Any, expected: LiteralType) -> Literal:
        cls = plain_class(python_type)
        value = python_val if isinstance(python_val, Settings) else from_client(cls, python_val)
        if isinstance(value, Settings) and issubclass(cls, type(value)):
            value = cls.from_dict(to_dict(value))
        if not isinstance(value, cls):
            raise TypeTransformerFailedError(f"expected {cls.__name__}, not {type(value).__name__}")
        return Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(portable(value)), tag=MESSAGEPACK)))

    def to_python_value(self, ctx: FlyteContext, lv: Literal, expected_python_type: Any) -> Settings:
        return from_client(plain_class(expected_python_type), content(lv))


def plain_class(of: Any) -> Any:
    """Return a class without the annotations around it."""
    return get_args(of)[0] if get_origin(of) is Annotated else of


def register_settings(on_guess: Callable[[], None]) -> None:
    """Register the transformer with flytekit, once."""
    TypeEngine.register_additional_type(SettingsTransformer(on_guess), Settings)


def known_classes() -> dict[str, type[Settings]]:
    """Return the classes that a registered interface may have, by name."""
    importlib.import_module("slipstream.config")
    return {each.__name__: each for each in subclasses(Settings)}


# Values


def content(literal: Literal) -> Any:
    """Return the content of a literal in the terms of JSON. Raises ``UserError``."""
    scalar = literal.scalar
    if scalar and scalar.binary and scalar.binary.tag == MESSAGEPACK:
        return msgpack.unpackb(scalar.binary.value, strict_map_key=False)
    if scalar and scalar.generic is not None:
        try:
            return MessageToDict(scalar.generic)
        except (SerializeToJsonError, ValueError) as error:
            raise UserError(f"config: cannot be read: {error}; expected finite numbers") from None
    if scalar and scalar.primitive and scalar.primitive.string_value is not None:
        return scalar.primitive.string_value
    raise UserError("config: is not of a kind that settings have; expected a mapping")


def from_client(cls: type[Settings], data: Any) -> Settings:
    """Build settings from what a client sent: a mapping, or JSON text of one. Raises ``UserError``."""
    if isinstance(data, str):
        data = parsed(data, cls.section or "config")
    if isinstance(data, Mapping) and "model" in nested_classes(cls):
        data = with_whole_arguments(data)
    return cls.from_dict(opened(cls, data))


def opened(cls: type[Settings], data: Any) -> Any:
    """Return a mapping of settings in which those of any type are values. Raises ``UserError``."""
    if not isinstance(data, Mapping):
        return data
    found, below = dict(data), nested_classes(cls)
    for name, value in data.items():
        if name in below:
            found[name] = opened(below[name], value)
        elif name in open_fields(cls) and isinstance(value, str):
            found[name] = parsed(value, path_of(cls.section, [name]))
    return found


def parsed(text: str, path: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON: {error}") from None


# Types


@cache
def described_type(cls: Any) -> LiteralType:
    """Return the type for interfaces: a Struct with a JSON schema, tagged with the name of its class."""
    schema = users_schema(settings_schema(cls))
    return LiteralType(
        simple=SimpleType.STRUCT,
        metadata=inlined(schema, schema),
        structure=TypeStructure(tag=f"{TAG}{cls.__name__}"),
        annotation=TypeAnnotation({CACHE_KEY_METADATA: {SERIALIZATION_FORMAT: MESSAGEPACK}}),
    )


def inlined(node: Schema, schema: Schema) -> Schema:
    """Return a node of pydantic's ``schema`` without references and limits.

    Every node has a type, except for unions, whose members have one. flytekit fails without.
    """
    node = resolved(schema, node)
    found: Schema = {key: node[key] for key in KEPT if key in node}
    if "properties" in node:  # titles of other nodes repeat the name of the field
        children = {name: inlined(child, schema) for name, child in node["properties"].items()}
        return {**found, "title": node["title"], "properties": children, "additionalProperties": False}
    if "anyOf" in node:
        found["anyOf"] = [inlined(member, schema) for member in node["anyOf"]]
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            found[key] = inlined(node[key], schema)
    return found
