"""Records: frozen dataclasses that stages exchange as JSON files of artifacts.

They are written and parsed according to their type hints. Every field is written, ``None`` as ``null``. Parsing refuses
unknown and mistyped fields, NaN, infinity, integers of more than 64 bits and deep nesting (:mod:`.strict_json`). Older
files may lack fields with a default. A field whose JSON name is not a Python identifier has an alias:
``Annotated[float, Field(alias="from")]``.

For damaged files :func:`from_json` raises an error, :func:`decode_record` returns None. The telemetry sampler uses
:func:`decode_plain`, as pydantic, which is loaded on demand, would exceed its memory.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact, canonical_json
from slipstream.shared.artifacts.strict_json import parse_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: Whether unknown fields, such as those of a later version, are an error or ignored.
Extra = Literal["forbid", "ignore"]
#: Largest size in bytes of a record for :func:`decode_record`. The largest written record, the device readings of a
#: pod, has about 1 MiB.
LARGEST_RECORD = 16 << 20
T = TypeVar("T")


@cache
def record_adapter(kind: Any, extra: Extra = "forbid") -> TypeAdapter[tuple[Any]]:
    """Return the pydantic adapter of a 1-tuple of ``kind``.

    pydantic takes no configuration for a standard dataclass, but passes on that of a tuple around it.
    """
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(tuple[kind], config=ConfigDict(extra=extra, strict=True, allow_inf_nan=False))


def to_tree(record: object, kind: object = None) -> Any:
    """Return the record as JSON-compatible dictionaries, lists, texts and numbers.

    ``kind`` is the record's type if it is not simply a class, such as ``list[Point]``. Raises ``ValueError`` for a
    mistyped field.
    """
    return record_adapter(kind or type(record)).dump_python((record,), mode="json", by_alias=True, warnings="error")[0]


def from_tree(tree: object, kind: type[T], where: object) -> T:
    """Return the record of type ``kind`` for the output of :func:`to_tree`. Raises as :func:`from_json`."""
    try:
        content = canonical_json(tree)
    except ValueError as error:  # NaN, infinity, and lone surrogates, which Python's reader accepts
        raise not_a_record(kind, where, str(error)) from None
    return from_json(content, kind, where)


def to_json(record: object, kind: object = None) -> bytes:
    """Return the record as canonical JSON bytes. Raises ``ValueError`` for a mistyped field, NaN or infinity."""
    return canonical_json(to_tree(record, kind))


def from_json(content: bytes, kind: type[T], where: object, *, extra: Extra = "forbid") -> T:
    """Parse ``content``, read from the file ``where``, as a record of type ``kind``.

    Raises ``DamagedArtifact`` with the file, the field and the remedy (``kind.REMEDY``). With ``extra="ignore"``
    unknown fields are skipped.
    """
    from pydantic import ValidationError

    try:
        (record,) = record_adapter(cast(Hashable, kind), extra).validate_json(b"[%b]" % content)
        parse_json(content)  # pydantic accepts integers of any size, and any number and nesting in a field of any type
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"][1:])
        mistake = f"{field}: {first['msg']}, not {reprlib.repr(first['input'])}" if field else first["msg"]
        raise not_a_record(kind, where, mistake) from None
    except ValueError as error:
        raise not_a_record(kind, where, str(error)) from None
    return record


def decode_record(content: bytes, kind: type[T], *, extra: Extra = "forbid") -> T | None:
    """Parse ``content`` as a record, or return None if it is damaged or larger than :data:`LARGEST_RECORD`.

    With ``extra="ignore"`` unknown fields are skipped.
    """
    if len(content) > LARGEST_RECORD:
        return None
    with suppress(DamagedArtifact):
        return from_json(content, kind, "record", extra=extra)
    return None


def to_plain_json(record: Any) -> bytes:
    """Return a record for :func:`decode_plain` as JSON on one line, ten times as fast as canonical JSON, unchecked."""
    return json.dumps(asdict(record), allow_nan=False).encode()


def decode_plain(content: bytes, kind: type[T]) -> T | None:
    """Parse a record of texts, numbers, booleans and lists and dictionaries of them; return None if it is damaged."""
    try:
        tree = parse_json(content)
        record = kind(**tree)
    except (TypeError, ValueError):
        return None
    hints = field_types(cast(Hashable, kind))
    return record if all(is_plain(value, hints[name]) for name, value in tree.items()) else None


field_types = cache(get_type_hints)


def is_plain(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(is_plain(value, one) for one in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(is_plain(one, arguments[1]) for one in value.values())
    if origin is list:
        return isinstance(value, list) and all(is_plain(one, arguments[0]) for one in value)
    return type(value) is kind or (kind is float and type(value) is int)


def not_a_record(kind: object, where: object, mistake: str) -> DamagedArtifact:
    remedy = getattr(kind, "REMEDY", "make it again")
    return DamagedArtifact(f"{where}: not {class_name_in_words(kind)} of this version ({mistake}); {remedy}")


def class_name_in_words(kind: object) -> str:
    """Return a class name as words with an article: ``NetworkProfile`` as "a network profile"."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", getattr(kind, "__name__", str(kind))).lower()
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def write_record(writer: ArtifactWriter, name: str, record: object) -> None:
    """Write ``record`` as the JSON file ``name`` of an artifact. Raises as :func:`to_json`."""
    writer.write_bytes(name, to_json(record))


def read_record(artifact: Artifact, name: str, kind: type[T]) -> T:
    """Return the record in the JSON file ``name``. Raises ``DamagedArtifact`` if it is damaged or not a ``kind``."""
    return from_json(artifact.read_bytes(name), kind, artifact.directory / name)
