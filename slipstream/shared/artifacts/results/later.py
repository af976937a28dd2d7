"""Fields of records that a later version added: left out at None, so that files without them keep their bytes."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

T = TypeVar("T")


def is_none(value: Any) -> bool:
    return value is None


Later = Annotated[T | None, Field(exclude_if=is_none)]
