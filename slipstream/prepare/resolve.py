"""What raw data is: decided once, before it is prepared, and handed down."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slipstream.errors import UserError
from slipstream.prepare.base_set import BaseSet, FileSet
from slipstream.prepare.config import DataConfig, Format
from slipstream.prepare.source.files import IMAGE_FORMATS, Listing, SourceFile, format_of
from slipstream.prepare.source.fingerprint import digest_files

if TYPE_CHECKING:
    import pandas as pd

#: How data is prepared: images in one pass; tables of columnar files, which are read where they lie, of text, which is
#: first made columnar, or of documents; or not at all, if a base set has seen all files.
Kind = Literal["images", "columnar", "text", "documents", "nothing new"]
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
#: The columns of texts in class folders.
TEXT, CLASS = "text", "class"
#: Rows of a row group of a table in memory.
ROW_GROUP = 1 << 16
#: Settings that images have no use for; nobody shall believe that they count.
FOR_TABLES = ("columns", "drop", "id", "group", "time", "weight", "types", "earlier")


#: How several machines share the work: each reads some of the units (row groups and batches, groups of documents); or
#: each first parses some of the files; or one does it all.
Division = Literal["units", "files", "none"]
DIVISIONS: dict[Kind, Division] = {"columnar": "units", "documents": "units", "text": "files"}


@dataclass(frozen=True)
class ResolvedSource:
    """Raw data, of which all is known but what is in the files.

    ``format`` is a value of data.format ("auto" only where a base set has seen all files), or "digits". ``files`` are
    those to read: not empty and, beside a ``base`` set, new. ``target`` and ``config`` are those that count: the target
    of texts in class folders is their class, and new files have the types that columns of the base set had.
    ``file_sets`` are the files whose rows the prepared table will hold, those of the base set first.
    """

    listing: Listing
    format: str
    files: tuple[SourceFile, ...]
    target: str
    config: DataConfig
    file_sets: tuple[FileSet, ...] = ()
    base: BaseSet | None = None

    @property
    def kind(self) -> Kind:
        return "nothing new" if self.base and not self.files else KINDS[self.format]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(file.size for file in self.files)

    @property
    def address(self) -> str:
        return self.listing.address

    @property
    def name(self) -> str:
        """What the data card calls it."""
        return Path(self.address).name

    @property
    def division(self) -> Division:
        return DIVISIONS.get(self.kind, "none")


def resolve(listing: Listing, target: str, config: DataConfig, fingerprint: str = "") -> ResolvedSource:
    """Decide what listed data is, from extensions and first bytes, and compare it with the base set if there is one.

    ``fingerprint`` is that of all files, computed if it is needed and not given. Raises ``UserError`` for what the list
    of files and the settings show to be wrong.
    """
    if not listing.files:
        check_image_settings(listing, config)
        return ResolvedSource(listing, "digits", (), target, config)
    declared = config.format if config.format != "auto" else format_of_all(listing, target)
    if declared in IMAGE_FORMATS:
        check_image_settings(listing, config)
        format = one_format(listing, listing.files, config)
        return ResolvedSource(listing, format, listing.files, target, config)
    user_target = target
    if declared == "text":
        target, config = texts_by_class(target, config)
    files, base = [file for file in listing.files if file.size], None
    if config.earlier:
        base = BaseSet.open(config.earlier)
        base.check_settings(target, config)
        files = base.unseen({listing.relative(file): file for file in listing.files}, user_target)
        if not files:
            return ResolvedSource(listing, declared, (), target, config, base=base)
    format = one_format(listing, files, config)
    config = replace(config, format=format)
    if base is None:
        file_sets = [file_set(listing, listing.files, user_target, fingerprint)]
    else:
        config = base.declared(config, text=KINDS[format] == "text")
        file_sets = [*base.schema.sources, file_set(listing, files, user_target)]
    return ResolvedSource(listing, format, tuple(files), target, config, tuple(file_sets), base)


def format_of_all(listing: Listing, target: str) -> Format:
    """What extensions say of data as a whole: "images" if there are any, "text" if no target is named and every file is
    a ``.txt`` in a folder; else "auto"."""
    if any(file.known_format in IMAGE_FORMATS for file in listing.files):
        return "images"
    in_folders = all("/" in listing.relative(file) and file.name.lower().endswith(".txt") for file in listing.files)
    return "text" if in_folders and not target else "auto"


def check_image_settings(listing: Listing, config: DataConfig) -> None:
    for name in FOR_TABLES:
        if getattr(config, name):
            where = repr(listing.address) if listing.address else "the digits data set of scikit-learn"
            raise UserError(f"data.{name}: is for tables, but {where} holds images; leave it out")
    if config.task == "regression":
        raise UserError("data.task: images are learned as classes; regression is for tables")


def texts_by_class(target: str, config: DataConfig) -> tuple[str, DataConfig]:
    """The target and the settings with which texts in class folders are a table. Raises ``UserError`` for a target."""
    if target:
        raise UserError(f"target: {target!r} is not needed, as texts are labelled by their folders; leave it out")
    return CLASS, replace(config, format="text", types={**config.types, TEXT: "document"})


def one_format(listing: Listing, files: Iterable[SourceFile], config: DataConfig) -> Format:
    formats = {format_of(file, config.format) for file in files}
    if len(formats) > 1:
        raise UserError(f"data: {listing.address!r} mixes {' and '.join(sorted(formats))} files; expected one format")
    return formats.pop()


def file_set(listing: Listing, files: Iterable[SourceFile], target: str, fingerprint: str = "") -> FileSet:
    named = [(listing.relative(file), file) for file in files]
    return FileSet(fingerprint or digest_files(named, target), [(name, file.size) for name, file in named])


# Tables in memory


def frame_file(frame: pa.Table | pd.DataFrame, directory: Path) -> str:
    """Write ``frame`` (pandas or Arrow) to a Parquet file in ``directory``, and give its path.

    The file is named by its content, so equal tables are one file, and what is made of it is found again. An index
    becomes a column unless it merely counts the rows. Raises ``UserError`` for a column that mixes types, or whose type
    Parquet does not have.
    """
    table = frame if isinstance(frame, pa.Table) else from_pandas(frame)
    sink = directory / ".frame.partial"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        pq.write_table(table.replace_schema_metadata(None), sink, row_group_size=ROW_GROUP, write_page_checksum=True)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk
        raise UserError(
            f"data: the table cannot be written as Parquet ({' '.join(str(error).split())}); expected columns of "
            "numbers, texts, dates or booleans"
        ) from None
    with sink.open("rb") as stream:
        digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
    return str(sink.replace(directory / f"frame-{digest}.parquet"))


def from_pandas(frame: pd.DataFrame) -> pa.Table:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UserError(f"data: is a {type(frame).__name__}; expected an address, a pandas DataFrame or an Arrow table")
    try:
        return pa.Table.from_pandas(frame)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise UserError(
            f"data: the frame cannot be taken as a table ({'; '.join(map(str, error.args))}); expected different names "
            "of columns, and one type in each"
        ) from None
