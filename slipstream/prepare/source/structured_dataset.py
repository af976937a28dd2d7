"""A table that another task hands over as Parquet: Flyte's StructuredDataset, which is also what becomes of its
DataFrames."""

from __future__ import annotations

from slipstream.errors import UserError
from slipstream.prepare.source.files import SourceFile, format_inside, list_source


def parquet_address(uri: str, format: str) -> str:
    """The address to pass as ``data``. Raises ``UserError`` unless all that lies at ``uri`` is Parquet.

    ``format`` is what Flyte knows of it, "" if nothing.
    """
    other = (
        format if format not in ("", "parquet") else next(filter(None, map(not_parquet, list_source(uri).files)), "")
    )
    if other:
        raise UserError(f"dataset: {uri!r} is not Parquet but {other}; hand over Parquet, or pass its address as data")
    return uri


def not_parquet(file: SourceFile) -> str:
    """What the file is instead; "" if it is Parquet."""
    found = format_inside(file)
    if found == "parquet":
        return ""
    claimed = file.known_format if file.known_format != "parquet" else ""
    return found or claimed or "something else"
