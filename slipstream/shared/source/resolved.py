"""Kind, format and settings of raw data, detected once before it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, Format
from slipstream.shared.source.files import Listing, SourceFile, file_format, files_unchanged

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


def class_folders(source: ResolvedSource, format: str, otherwise: str = "") -> list[list[str]]:
    folders = [source.listing.relative(file).split("/")[:-1] for file in source.files]
    for file, folder in zip(source.files, folders, strict=True):
        if not folder:
            raise UserError(
                f"{file.uri}: is not in a class folder; expected a directory with one folder of {format} for each "
                f"class{otherwise}"
            )
    by_depth: dict[int, list[str]] = {}
    for names in sorted({tuple(folder) for folder in folders}):
        by_depth.setdefault(len(names), []).append("/".join(names))
    if len(by_depth) > 1:
        depths = "; ".join(f"{depth}: {some_names(by_depth[depth])}" for depth in sorted(by_depth))
        raise UserError(
            f"data: {source.address!r} has {format} at different depths ({depths}); expected class folders at one "
            "depth; give the directory above the class folders, or move the other files"
        )
    return folders


def some_names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")


HASH_BYTES = 8 << 20


def fingerprint_source(listing: Listing, target: str = "") -> str:
    """Return the fingerprint of raw data: XXH3-128 (hex) of the names and bytes of its files, and of ``target``.

    For objects in a store, key, size and version replace the bytes. Raise ``UserError`` if a file changes while it is
    read.
    """
    if not listing.address:
        pixels, labels = load_digits()
        digest = xxhash.xxh3_128(target.encode() + b"\0")
        digest.update(b"digits\0")
        digest.update(pixels.tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()
    # The folder of an image is its label, so it counts; the location of the whole set does not.
    with files_unchanged(listing.files):
        return digest_files([(listing.relative(file), file) for file in listing.files], target)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits, the default data: 1,797 real scans.

    Pixels are uint8 ``[1797, 1, 8, 8]`` (0 to 16), labels int32 ``[1797]`` (0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)


def digest_files(files: list[tuple[str, SourceFile]], target: str) -> str:
    digest = xxhash.xxh3_128(target.encode() + b"\0")
    for name, file in files:
        etag = "" if file.local else file.version
        digest.update(f"{name}\0{file.size}\0{etag}\0".encode())
        if file.local:
            with file.open() as stream:
                while piece := stream.read(HASH_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
