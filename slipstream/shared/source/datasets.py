"""Tables from another Flyte task: a StructuredDataset of Parquet or a DataFrame."""

from __future__ import annotations

from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import list_units
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import Listing, SourceFile, format_inside, list_source
from slipstream.shared.source.tables import keys_in


def list_parquet(uri: str, format: str) -> Listing:
    """List the files of a dataset.

    ``format`` is Flyte's format of the dataset, or "". Raise ``UserError`` unless all files at ``uri`` are Parquet.
    """
    listing = list_source(uri) if format in ("", "parquet") else None
    other = next(filter(None, map(not_parquet, listing.files)), "") if listing else format
    if listing is None or other:
        raise UserError(f"dataset: {uri!r} is not Parquet but {other}; pass Parquet as dataset, or the address as data")
    return listing


def not_parquet(file: SourceFile) -> str:
    inside = format_inside(file)
    if inside == "parquet":
        return ""
    named = file.known_format if file.known_format != "parquet" else None
    return inside or named or "something else"


def undeclared_columns(listing: Listing, declared: list[str], target: str, config: DataConfig) -> list[str]:
    """Return the columns of Parquet files and their directories that a dataset's type does not declare.

    Raise ``UserError`` for a declared column that no file has, or a needed column that is not declared.
    """
    names: dict[str, None] = {}
    for file in listing.files:
        schema, _ = list_units(file, "parquet")
        names |= dict.fromkeys([*schema.names, *keys_in(listing.relative(file))])
    # Flyte declares the fields of nested values as "column.field".
    known = [name if name in names else name.partition(".")[0] for name in declared]
    absent = [name for name, column in zip(declared, known, strict=True) if column not in names]
    if absent:
        raise UserError(
            f"dataset: its type declares the column {absent[0]!r}, which {listing.address!r} lacks; expected "
            "columns of the data in kwtypes(…)"
        )
    special = {f"data.{setting}": getattr(config, setting) for setting in ("id", "group", "time", "weight")}
    for setting, name in {"target": target, **special}.items():
        if name and name not in known:
            raise UserError(
                f"{setting}: {name!r} is not among the columns that the dataset's type declares, "
                f"{', '.join(map(repr, declared))}; add it to kwtypes(…)"
            )
    return [name for name in names if name not in known]
