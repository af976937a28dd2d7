"""Kind, format and settings of raw data, detected once before it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, Format
from slipstream.shared.source.files import IMAGE_FORMATS, Listing, SourceFile, file_format

#: Way of reading data: images; tables of columnar files, of text files (first converted to columnar) or of documents;
#: language; or "nothing new", if a base set already contains all files.
Kind = Literal["images", "columnar", "text", "documents", "language", "nothing new"]
KINDS: dict[str, Kind] = {
    "digits": "images",
    "images": "images",
    "arrays": "images",
    "parquet": "columnar",
    "arrow": "columnar",
    "csv": "text",
    "json": "text",
    "text": "documents",
}
#: Columns of a table of texts in class folders.
TEXT, CLASS = "text", "class"


@dataclass(frozen=True)
class ResolvedSource:
    """Raw data with all settings decided, before its files are read.

    ``format`` is a value of ``data.format`` or "digits". ``files`` are the files to read. ``target`` and ``config`` are
    the effective ones: for texts in class folders, the target is the class.
    """

    listing: Listing
    format: str
    files: tuple[SourceFile, ...]
    target: str
    config: DataConfig

    @property
    def kind(self) -> Kind:
        return "language" if self.config.task == "language" else KINDS[self.format]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def address(self) -> str:
        return self.listing.address

    @property
    def name(self) -> str:
        return Path(self.address).name


def format_of_all(listing: Listing, target: str) -> Format:
    """Return the format of all files together, from their extensions.

    It is "images" if there are any, "text" if every file is a ``.txt`` in a folder and no target is set, else "auto".
    """
    if any(file.known_format in IMAGE_FORMATS for file in listing.files):
        return "images"
    in_folders = all("/" in listing.relative(file) and file.name.lower().endswith(".txt") for file in listing.files)
    return "text" if in_folders and not target else "auto"


def texts_by_class(target: str, config: DataConfig) -> tuple[str, DataConfig]:
    """Return target and settings for texts in class folders; raise ``UserError`` if the user set a target."""
    if target:
        raise UserError(f"target: {target!r} is not used, as texts are labelled by their folders; remove it")
    return CLASS, replace(config, format="text", types={**config.types, TEXT: "document"})


def one_format(listing: Listing, files: Iterable[SourceFile], config: DataConfig) -> Format:
    formats = {file_format(file, config.format) for file in files}
    if len(formats) > 1:
        raise UserError(f"data: {listing.address!r} mixes {' and '.join(sorted(formats))} files; expected one format")
    return formats.pop()
