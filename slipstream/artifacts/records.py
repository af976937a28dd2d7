"""Records: the frozen dataclasses that stages hand each other, as JSON files of artifacts.

All are written and read here, by their type hints. Every field is written, ``None`` as ``null``. A reader accepts what
a writer writes: an unknown or mistyped field is refused, and so are NaN, infinity, integers of more than 64 bits and
deep nesting (:mod:`.strict_json`). A field may be missing if it has a default, as in files from before the field was
there. A field whose name is no Python name has an alias: ``Annotated[float, Field(alias="from")]``.

:func:`from_json` raises for damage; :func:`decode_record` returns None, for the records that are skipped if they are
damaged.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from slipstream.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact, canonical_json
from slipstream.artifacts.strict_json import parse_json

#: What a reader does with fields that the dataclass lacks: those of a later version may be ignored.
Extra = Literal["forbid", "ignore"]
#: The most bytes of a record that is skipped if it is damaged. The largest, a pod's device readings, has about 1 MiB.
LARGEST_RECORD = 16 << 20
T = TypeVar("T")


@cache
def adapter(kind: Any, extra: Extra = "forbid") -> TypeAdapter[tuple[Any]]:
    """pydantic takes no configuration for a dataclass that is not its own, but hands on that of a tuple around it."""
    return TypeAdapter(tuple[kind], config=ConfigDict(extra=extra, strict=True, allow_inf_nan=False))


def to_tree(record: object, kind: object = None) -> Any:
    """The record as JSON holds it: dictionaries, lists, texts and numbers. ``kind`` is its type if that is no class, as
    ``list[Point]``. Raises ``ValueError`` if a field is not of its type."""
    return adapter(kind or type(record)).dump_python((record,), mode="json", by_alias=True, warnings="error")[0]


def from_tree(tree: object, kind: type[T], where: object) -> T:
    """The inverse of :func:`to_tree`. Raises as :func:`from_json`."""
    try:
        content = canonical_json(tree)
    except ValueError as error:  # NaN, infinity, and halves of characters, which Python's reader lets pass
        raise not_a_record(kind, where, str(error)) from None
    return from_json(content, kind, where)


def to_json(record: object, kind: object = None) -> bytes:
    """The record as the canonical bytes of a file. Raises as :func:`to_tree`, and for NaN and infinity."""
    return canonical_json(to_tree(record, kind))


def from_json(content: bytes, kind: type[T], where: object, *, extra: Extra = "forbid") -> T:
    """The record in the ``content`` of the file ``where``. Raises ``DamagedArtifact`` naming the file, the field, and
    what ``kind`` says of how to mend it (``MEND``). With ``extra="ignore"`` fields that ``kind`` lacks are skipped."""
    try:
        (record,) = adapter(cast(Hashable, kind), extra).validate_json(b"[%b]" % content)
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
    """Return the record in ``content``, or None if that is damaged, larger than :data:`LARGEST_RECORD` or anything
    else. ``extra`` is that of :func:`from_json`."""
    if len(content) > LARGEST_RECORD:
        return None
    with suppress(DamagedArtifact):
        return from_json(content, kind, "record", extra=extra)
    return None


def not_a_record(kind: object, where: object, mistake: str) -> DamagedArtifact:
    mend = getattr(kind, "MEND", "make it again")
    return DamagedArtifact(f"{where}: not {words(kind)} of this version ({mistake}); {mend}")


def words(kind: object) -> str:
    """``NetworkProfile`` as "a network profile"."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", getattr(kind, "__name__", str(kind))).lower()
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def write_record(writer: ArtifactWriter, name: str, record: object) -> None:
    """Write the record as the file ``name`` of an artifact. Raises as :func:`to_json`."""
    writer.write_bytes(name, to_json(record))


def read_record(artifact: Artifact, name: str, kind: type[T]) -> T:
    """The record in the file ``name`` of an artifact. Raises ``DamagedArtifact``."""
    return from_json(artifact.read_bytes(name), kind, artifact.directory / name)
