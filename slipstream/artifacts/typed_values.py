"""Python values as bytes and back without pickle: the reader names the type, and what is read can choose none.

A value is one safetensors file. Its tensor ``json`` holds the value as JSON; every other tensor, named by a number, is
a NumPy array or an Arrow record batch (an IPC stream) to which the JSON refers by that name. Fields of dataclasses and
named tuples are written and read by their type hints, and a reader accepts exactly what a writer writes: an unknown,
missing or mistyped field is refused. Types: ``bool``, ``int``, ``float``, ``str``, ``Path``, ``Literal``, ``list``,
``tuple``, ``dict`` with ``str`` keys, ``X | None``, dataclasses, named tuples, ``np.ndarray`` of numbers,
``pa.RecordBatch``, and ``Any`` for what JSON gives back as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import struct
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slipstream.artifacts.format import DamagedArtifact

TREE = "json"
#: Lone surrogates, which names of files may hold, are kept.
ENCODING = ("utf-8", "surrogatepass")
Tensors = dict[str, np.ndarray]
Convert = Callable[[Any, Tensors], Any]


def encode(value: Any, kind: Any) -> bytes:
    """``value``, which is of the type ``kind``, as bytes. Raises ``TypeError`` for what is not."""
    tensors: Tensors = {}
    try:
        tree = codec_of(kind).write(value, tensors)
    except Mismatch as mismatch:
        raise TypeError(str(mismatch)) from None
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return save({TREE: np.frombuffer(text.encode(*ENCODING), np.uint8), **tensors})


def decode(data: bytes, kind: Any, name: object) -> Any:
    """The value of the type ``kind`` that :func:`encode` made the content of the file ``name``.

    Raises ``DamagedArtifact`` with the name of the file, and of the field if one is wrong.
    """
    try:
        tensors = load(data)
        tree = json.loads(tensors.pop(TREE).tobytes().decode(*ENCODING))
        value = codec_of(kind).read(tree, tensors)
        if tensors:
            raise Mismatch(min(tensors), "a tensor of any field")
    except Mismatch as mismatch:
        wrong = str(mismatch)
    except (SafetensorError, KeyError, ValueError, RecursionError):
        wrong = "holds no value in safetensors and JSON"
    else:
        return value
    raise DamagedArtifact(f"{name}: {wrong}; expected {described(kind)} as this version of the code writes it")


def described(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


class Mismatch(Exception):
    """A value is not of its type; ``path`` names the field, from the outside in."""

    def __init__(self, found: Any, expected: str) -> None:
        self.words = f"{reprlib.repr(found)} is not {expected}"
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.words}" if self.path else self.words


@dataclass(frozen=True)
class Codec:
    """The two directions between a value of one type and JSON. Both raise ``Mismatch``.

    ``plain`` is the Python type of all values if both directions return these as they are.
    """

    write: Convert
    read: Convert
    plain: type | None = None

    def leaves_unchanged(self, values: Iterable[Any]) -> bool:
        """Whether all ``values`` are right and stay as they are: known without a call for each of many."""
        return self.plain is not None and {self.plain}.issuperset(map(type, values))


@cache
def codec_of(kind: Any) -> Codec:
    """The codec of a type hint. Raises ``TypeError`` for types that have none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is list:
        return sequence(list, codec_of(arguments[0]))
    if origin is tuple and arguments[1:] == (...,):
        return sequence(tuple, codec_of(arguments[0]))
    if origin is tuple:
        return fixed_tuple([codec_of(argument) for argument in arguments])
    if origin is dict and arguments[0] is str:
        return mapping(codec_of(arguments[1]))
    if origin is Literal:
        return one_of(arguments)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and types.NoneType in arguments:
        return optional(codec_of(next(one for one in arguments if one is not types.NoneType)))
    if dataclasses.is_dataclass(kind):
        return record(kind, [field.name for field in dataclasses.fields(kind)])
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return record(kind, kind._fields)
    raise TypeError(f"{kind}: values of this type cannot be written; {__name__} lists those that can")


def expect(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise Mismatch(value, f"of type {kind.__name__}")


# Types of one value


def same(accept: Callable[[Any], bool], expected: str) -> Codec:
    """A type whose values JSON gives back as they are."""

    def convert(value: Any, _: Tensors) -> Any:
        if not accept(value):
            raise Mismatch(value, expected)
        return value

    return Codec(convert, convert)


def exactly(kind: type) -> Codec:
    return replace(same(lambda value: type(value) is kind, f"of type {kind.__name__}"), plain=kind)


def one_of(values: tuple[Any, ...]) -> Codec:
    # The types are compared because 1, 1.0 and True are equal.
    allowed = {(type(value), value) for value in values}
    return same(lambda value: is_json(value) and (type(value), value) in allowed, f"one of {values}")


def write_float(value: Any, _: Tensors) -> Any:
    """JSON's numbers are finite, and Python's spelling of them gives back the same bits. Others are written as the
    hexadecimal digits of their eight bytes. An ``int``, which may stand for a ``float``, stays one."""
    if type(value) is int:
        return value
    if not isinstance(value, float):
        raise Mismatch(value, "of type float")
    return float(value) if math.isfinite(value) else struct.pack(">d", value).hex()


def read_float(tree: Any, _: Tensors) -> Any:
    if type(tree) in (int, float):
        return tree
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(tree))
    except (TypeError, ValueError, struct.error):
        raise Mismatch(tree, "of type float") from None
    return value


def write_path(value: Any, _: Tensors) -> str:
    if not isinstance(value, Path):
        raise Mismatch(value, "a path")
    return str(value)


def read_path(tree: Any, _: Tensors) -> Path:
    expect(tree, str)
    return Path(tree)


def is_json(value: Any) -> bool:
    """Whether JSON gives back ``value`` as it is."""
    if type(value) is dict:
        return all(type(key) is str and is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


# Arrays


def write_array(value: Any, tensors: Tensors) -> str:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise Mismatch(value, "an array of numbers")
    name = str(len(tensors))
    # safetensors takes the memory as it lies.
    tensors[name] = np.asarray(value, order="C")
    return name


def read_array(tree: Any, tensors: Tensors) -> np.ndarray:
    """Takes the tensor out of ``tensors``: each belongs to one field."""
    if type(tree) is not str or tree not in tensors:
        raise Mismatch(tree, "the name of a tensor that no other field has")
    return tensors.pop(tree)


def write_batch(value: Any, tensors: Tensors) -> str:
    if not isinstance(value, pa.RecordBatch):
        raise Mismatch(value, "a record batch")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, value.schema) as stream:
        stream.write_batch(value)
    return write_array(np.frombuffer(sink.getvalue(), np.uint8), tensors)


def read_batch(tree: Any, tensors: Tensors) -> pa.RecordBatch:
    try:
        with pa.ipc.open_stream(pa.py_buffer(read_array(tree, tensors))) as stream:
            (batch,) = stream
        # Offsets that point elsewhere would be read as they are.
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, OSError):
        raise Mismatch(tree, "a tensor with one Arrow record batch") from None
    return batch


# Types of parts


def each(parts: Iterable[tuple[Any, Convert, Any]], tensors: Tensors) -> Iterator[Any]:
    """Convert every value of ``parts``, which is given with its name and its converter."""
    for name, convert, value in parts:
        try:
            yield convert(value, tensors)
        except Mismatch as mismatch:
            mismatch.path.insert(0, str(name))
            raise


def sequence(kind: type[list[Any]] | type[tuple[Any, ...]], item: Codec) -> Codec:
    """A list or a tuple of any length."""

    def write(values: Any, tensors: Tensors) -> list[Any]:
        expect(values, kind)
        if item.leaves_unchanged(values):
            return list(values)
        return list(each(((place, item.write, value) for place, value in enumerate(values)), tensors))

    def read(tree: Any, tensors: Tensors) -> Any:
        expect(tree, list)
        if item.leaves_unchanged(tree):
            return kind(tree)
        return kind(each(((place, item.read, value) for place, value in enumerate(tree)), tensors))

    return Codec(write, read)


def fixed_tuple(items: list[Codec]) -> Codec:
    """A tuple with a type for each place."""

    def check(values: Any, kind: type) -> None:
        expect(values, kind)
        if len(values) != len(items):
            raise Mismatch(values, f"a {kind.__name__} of {len(items)} values")

    def write(values: Any, tensors: Tensors) -> list[Any]:
        check(values, tuple)
        parts = ((place, item.write, values[place]) for place, item in enumerate(items))
        return list(each(parts, tensors))

    def read(tree: Any, tensors: Tensors) -> tuple[Any, ...]:
        check(tree, list)
        return tuple(each(((place, item.read, tree[place]) for place, item in enumerate(items)), tensors))

    return Codec(write, read)


def mapping(item: Codec) -> Codec:
    """A dictionary, in its order."""

    def with_each(convert: Convert) -> Convert:
        def convert_all(values: Any, tensors: Tensors) -> dict[str, Any]:
            expect(values, dict)
            if not {str}.issuperset(map(type, values)):
                raise Mismatch(next(key for key in values if type(key) is not str), "of type str, as keys are")
            if item.leaves_unchanged(values.values()):
                return values
            parts = ((key, convert, value) for key, value in values.items())
            return dict(zip(values, each(parts, tensors), strict=True))

        return convert_all

    return Codec(with_each(item.write), with_each(item.read))


def optional(present: Codec) -> Codec:
    return Codec(
        lambda value, tensors: None if value is None else present.write(value, tensors),
        lambda tree, tensors: None if tree is None else present.read(tree, tensors),
    )


def record(kind: Any, names: Iterable[str]) -> Codec:
    """A dataclass or a named tuple: its fields by name."""
    hints = typing.get_type_hints(kind)
    codecs = {name: codec_of(hints[name]) for name in names}

    def write(value: Any, tensors: Tensors) -> dict[str, Any]:
        expect(value, kind)
        parts = ((name, codec.write, getattr(value, name)) for name, codec in codecs.items())
        return dict(zip(codecs, each(parts, tensors), strict=True))

    def read(tree: Any, tensors: Tensors) -> Any:
        if type(tree) is not dict:
            raise Mismatch(tree, f"the fields of {kind.__name__}")
        if unknown := sorted(tree.keys() - codecs.keys()):
            raise Mismatch(unknown[0], f"a field of {kind.__name__}")
        if missing := sorted(codecs.keys() - tree.keys()):
            raise Mismatch(missing[0], f"there, though {kind.__name__} has this field")
        parts = ((name, codec.read, tree[name]) for name, codec in codecs.items())
        fields = dict(zip(codecs, each(parts, tensors), strict=True))
        try:
            return kind(**fields)
        except ValueError as error:  # of a class that checks its values
            raise Mismatch(tree, f"a valid {kind.__name__}: {error}") from None

    return Codec(write, read)


SIMPLE: dict[Any, Codec] = {
    bool: exactly(bool),
    int: exactly(int),
    str: exactly(str),
    Any: same(is_json, "made of what JSON holds"),
    float: Codec(write_float, read_float),
    Path: Codec(write_path, read_path),
    np.ndarray: Codec(write_array, read_array),
    pa.RecordBatch: Codec(write_batch, read_batch),
}
