"""Serialization of typed Python values without pickle: the reader names the type, not the data.

A value is one safetensors file. Its tensor ``json`` holds the value as JSON. The other tensors, named by numbers, are
NumPy arrays or Arrow record batches (IPC streams) to which the JSON refers. Dataclasses and named tuples are written by
field name and checked strictly by their type hints, through pydantic. Types: ``bool``, ``int``, ``float``, ``str``,
``Path``, ``Literal``, ``list``, ``tuple``, ``dict`` with ``str`` keys, ``X | None``, dataclasses, named tuples,
``np.ndarray`` of numbers, ``pa.RecordBatch``, and ``Any`` for JSON values.

The schemas are hand-written: pydantic's own refuse lone surrogates in JSON and do not preserve all bits of floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import struct
import types
import typing
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slipstream.shared.artifacts.format import DamagedArtifact

TREE = "json"
#: Encoding of the JSON; it keeps lone surrogates, which file names may contain.
ENCODING = ("utf-8", "surrogatepass")
#: Types that JSON preserves exactly.
PLAIN = {bool, int, str, types.NoneType}
Tensors = dict[str, np.ndarray]
Info = core_schema.ValidationInfo[Tensors]


def encode_value(value: object, kind: object) -> bytes:
    """Serialize ``value``. Raises ``TypeError`` if it does not have the type ``kind``."""
    validator, tensors = validator_of(kind), Tensors()
    tree = tree_of(value, tensors)
    try:
        validator.validate_python(tree, context={**tensors})
    except ValidationError as error:
        raise TypeError(first_mistake(error)) from None
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return save({TREE: np.frombuffer(text.encode(*ENCODING), np.uint8), **tensors})


def decode_value(data: bytes, kind: object, name: object) -> Any:
    """Deserialize a value of type ``kind`` that :func:`encode_value` wrote to the file ``name``.

    Raises ``DamagedArtifact`` with the file name and, if possible, the wrong field.
    """
    try:
        tensors = load(data)
        tree = json.loads(tensors.pop(TREE).tobytes().decode(*ENCODING))
        value = validator_of(kind).validate_python(tree, context=tensors)
        wrong = f"the tensor {min(tensors)!r} belongs to no field" if tensors else ""
    except ValidationError as error:
        wrong = first_mistake(error)
    except (SafetensorError, KeyError, ValueError, RecursionError):
        wrong = "cannot be decoded as a value in safetensors and JSON"
    if wrong:
        described = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else kind
        raise DamagedArtifact(f"{name}: {wrong}; expected {described} as this version of the code writes it")
    return value


def first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    at = "".join(f"{step}." for step in first["loc"]).removesuffix(".")
    message = first["msg"].removeprefix("Value error, ")
    return f"{at and f'{at}: '}{message}, not {reprlib.repr(first['input'])}"


# Writing


class FloatBits(str):
    """Non-finite float as 16 hexadecimal digits of its eight bytes, since JSON cannot hold it."""


def tree_of(value: Any, tensors: Tensors) -> Any:
    """Convert a value to JSON-compatible objects; add its arrays to ``tensors``.

    Types are not checked. Tuples stay tuples, which JSON writes as lists.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else FloatBits(struct.pack(">d", value).hex())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        same = PLAIN.issuperset(map(type, value))
        return value if same else type(value)(tree_of(each, tensors) for each in value)
    if isinstance(value, dict):
        same = PLAIN.issuperset(map(type, value.values()))
        return value if same else {name: tree_of(each, tensors) for name, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, pa.RecordBatch):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as stream:
            stream.write_batch(value)
        value = np.frombuffer(sink.getvalue(), np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        # safetensors copies the memory regardless of strides.
        tensors[name := str(len(tensors))] = np.asarray(value, order="C")
        return name
    names = getattr(value, "_fields", None) or [field.name for field in fields_of(value)]
    return {name: tree_of(getattr(value, name), tensors) for name in names} or value


def fields_of(value: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


# Reading


@cache
def validator_of(kind: object) -> SchemaValidator:
    return SchemaValidator(schema_of(kind))


def schema_of(kind: Any) -> CoreSchema:
    """Return the pydantic schema that validates JSON of the type ``kind`` and rebuilds the value.

    Raises ``TypeError`` for unsupported types.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if origin is list:
        return core_schema.list_schema(schema_of(arguments[0]), strict=True)
    if origin is tuple:
        items = [schema_of(each) for each in arguments if each is not ...]
        return core_schema.tuple_schema(items, variadic_item_index=0 if arguments[1:] == (...,) else None)
    if origin is dict and arguments[0] is str:
        return core_schema.dict_schema(LEAVES[str], schema_of(arguments[1]), strict=True)
    if origin is Literal:
        return core_schema.no_info_plain_validator_function(partial(read_one_of, arguments))
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and types.NoneType in arguments:
        return core_schema.nullable_schema(schema_of(next(one for one in arguments if one is not types.NoneType)))
    names = getattr(kind, "_fields", None) or [field.name for field in fields_of(kind)]
    if not names:
        raise TypeError(f"{kind}: values of this type cannot be written; {__name__} lists those that can")
    hints = typing.get_type_hints(kind)
    fields = {name: core_schema.typed_dict_field(schema_of(hints[name])) for name in names}
    tree = core_schema.typed_dict_schema(fields, extra_behavior="forbid", strict=True)
    return core_schema.no_info_after_validator_function(lambda values: kind(**values), tree)


def read_one_of(allowed: tuple[object, ...], tree: object) -> object:
    # The types are compared because 1, 1.0 and True are equal.
    if not any(type(tree) is type(value) and tree == value for value in allowed):
        raise ValueError(f"Input should be one of {allowed}")
    return tree


def read_float(tree: object) -> float:
    """Return a float from JSON: a number unchanged, or hexadecimal digits decoded (:class:`FloatBits`)."""
    if isinstance(tree, float) or type(tree) is int:
        return tree
    if isinstance(tree, str) and len(tree) == 16:
        (value,) = struct.unpack(">d", bytes.fromhex(tree))
        return float(value)
    raise ValueError("Input should be a float")


def read_any(tree: object) -> object:
    if type(tree) is dict:
        for name, value in tree.items():
            read_any(value if type(name) is str else name)
    elif type(tree) is list:
        for value in tree:
            read_any(value)
    elif type(tree) not in PLAIN | {float} or (isinstance(tree, float) and not math.isfinite(tree)):
        raise ValueError("Input should consist of JSON values")
    return tree


def read_array(tree: object, info: Info) -> np.ndarray:
    """Return the tensor named ``tree`` and remove it from ``info.context``, as only one field may use it."""
    if type(tree) is not str or tree not in info.context:
        raise ValueError("Input should be the name of a tensor that no other field has")
    return info.context.pop(tree)


def read_batch(tree: object, info: Info) -> pa.RecordBatch:
    try:
        with pa.ipc.open_stream(pa.py_buffer(read_array(tree, info))) as stream:
            (batch,) = stream
        # Otherwise offsets that point elsewhere would be followed.
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, OSError):
        raise ValueError("Input should be the name of a tensor with one Arrow record batch") from None
    return batch


LEAVES: dict[object, CoreSchema] = {
    bool: core_schema.bool_schema(strict=True),
    int: core_schema.int_schema(strict=True),
    str: core_schema.str_schema(strict=True),
    Path: core_schema.no_info_after_validator_function(Path, core_schema.str_schema(strict=True)),
    float: core_schema.no_info_plain_validator_function(read_float),
    Any: core_schema.no_info_plain_validator_function(read_any),
    np.ndarray: core_schema.with_info_plain_validator_function(read_array),
    pa.RecordBatch: core_schema.with_info_plain_validator_function(read_batch),
}
