"""Detection of kind, format and settings of raw data, once before preparation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slipstream.pipeline.prepare.base_set import BaseSet, FileSet
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.prepared.token_rows import CONFIG, FAST
from slipstream.shared.errors import UserError
from slipstream.shared.language.engine import tokenizers_library
from slipstream.shared.language.tokenizer import Tokenizer, read_tokenizer, vocabulary_beside
from slipstream.shared.source.config import DataConfig, Format
from slipstream.shared.source.files import IMAGE_FORMATS, LANGUAGE_TABLES, Listing, SourceFile, format_of_all
from slipstream.shared.source.resolved import (
    KINDS,
    Kind,
    ResolvedSource,
    digest_files,
    one_format,
    texts_by_class,
)

if TYPE_CHECKING:
    import pandas as pd

#: Rows per row group when a table in memory is written as Parquet.
ROW_GROUP = 1 << 16
#: Settings for tables only; setting one for images or language is an error.
FOR_TABLES = ("columns", "drop", "id", "group", "time", "weight", "types", "earlier")
#: Values of ``data.tokenizer`` with which a tokenizer is built.
MADE_HERE = ("train", "bytes")


#: How several machines divide the work: by units (row groups, record batches, groups of documents), by files to parse
#: first, or not at all.
Division = Literal["units", "files", "none"]
DIVISIONS: dict[Kind, Division] = {"columnar": "units", "documents": "units", "text": "files"}


@dataclass(frozen=True)
class SourceToPrepare(ResolvedSource):
    """Resolved source, with its base set if any.

    With a base set, ``files`` are the new files, read with its column types; without new files, ``format`` may be
    "auto". ``file_sets`` are all files of the prepared table, those of the base set first.
    """

    file_sets: tuple[FileSet, ...] = ()
    base: BaseSet | None = None
    #: Files of the user's tokenizer for language, by name; empty if none was given.
    tokenizer: dict[str, str] = field(default_factory=dict)
    #: Number of token ids of the model in the tokenizer's directory; 0 without a model.
    vocabulary: int = 0

    @property
    def kind(self) -> Kind:
        return "nothing new" if self.base and not self.files else super().kind

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the user's tokenizer files and ``vocabulary``, to detect changes; "" without a tokenizer."""
        stated = [self.tokenizer, self.vocabulary]
        return xxhash.xxh3_128_hexdigest(canonical_json(stated)) if self.tokenizer else ""

    @property
    def division(self) -> Division:
        return DIVISIONS.get(self.kind, "none")


def resolve_source(listing: Listing, target: str, config: DataConfig, fingerprint: str = "") -> SourceToPrepare:
    """Detect the kind of listed data from extensions and first bytes, and compare the files with the base set.

    ``fingerprint`` is of all files; if it is "" it is computed when needed. Raise ``UserError`` for errors in the file
    list or the settings.
    """
    if config.task == "language":
        return resolve_language(listing, target, config)
    if not listing.files:
        check_image_settings(listing, config)
        return SourceToPrepare(listing, "digits", (), target, config)
    declared = format_of_all(listing, target, config)
    if declared in IMAGE_FORMATS:
        check_image_settings(listing, config)
        format = one_format(listing, listing.files, config)
        return SourceToPrepare(listing, format, listing.files, target, config)
    user_target = target
    if declared == "text":
        target, config = texts_by_class(target, config)
    files, base = [file for file in listing.files if file.size], None
    if config.earlier:
        base = BaseSet.open(config.earlier)
        base.check_settings(target, config)
        files = base.unseen({listing.relative(file): file for file in listing.files}, user_target)
        if not files:
            return SourceToPrepare(listing, declared, (), target, config, base=base)
    format = one_format(listing, files, config)
    config = replace(config, format=format)
    if base is None:
        file_sets = [file_set(listing, listing.files, user_target, fingerprint)]
    else:
        config = base.declared(config, text=KINDS[format] == "text")
        file_sets = [*base.schema.sources, file_set(listing, files, user_target)]
    return SourceToPrepare(listing, format, tuple(files), target, config, tuple(file_sets), base)


def resolve_language(listing: Listing, target: str, config: DataConfig) -> SourceToPrepare:
    """Detect whether files are documents or tables of documents or conversations; read the user's tokenizer."""
    if target:
        raise UserError(
            f"target: {target!r} is not used, as data.task: language learns to predict the next token; remove it"
        )
    for name in FOR_TABLES:
        if getattr(config, name):
            raise UserError(f"data.{name}: is for tables, not for data.task: language; remove it")
    files = tuple(file for file in listing.files if file.size)
    tokenizers_library()
    tokenizer, vocabulary = ({}, 0) if config.tokenizer in MADE_HERE else given_tokenizer(config.tokenizer)
    format = corpus_format(listing, files, config)
    return SourceToPrepare(listing, format, files, "", config, tokenizer=tokenizer, vocabulary=vocabulary)


def given_tokenizer(address: str) -> tuple[dict[str, str], int]:
    """Return the user's tokenizer files, and the vocabulary size of the model in the same directory (0 without one).

    Raise ``UserError`` if the model has no embedding for a token id.
    """
    tokenizer, vocabulary = Tokenizer(read_tokenizer(address)), vocabulary_beside(address)
    if 0 < vocabulary < tokenizer.vocabulary:
        last = tokenizer.vocabulary - 1
        raise UserError(
            f"data.tokenizer: {address}: {FAST} has the token {tokenizer.text_of(last)!r} with the id {last}, and the "
            f"model of {CONFIG} has embeddings for {vocabulary} ids (vocab_size); expected smaller ids; remove tokens "
            "that were added, or give the model embeddings for them (resize_token_embeddings in transformers)"
        )
    return tokenizer.files, vocabulary


def check_ids_of_base(tokenizer: str, base: str) -> None:
    """Raise ``UserError`` unless the user's tokenizer has as many token ids as the base has embeddings.

    A tokenizer in the base's own directory is not checked.
    """
    if tokenizer in (*MADE_HERE, base):
        return
    files, vocabulary = given_tokenizer(tokenizer)
    ids, embeddings = max(Tokenizer(files).vocabulary, vocabulary), vocabulary_beside(base)
    if embeddings and ids != embeddings:
        raise UserError(
            f"data.tokenizer: {tokenizer} has {ids} token ids, and model.base {base} has embeddings for {embeddings}; "
            "expected equal numbers; give the base's directory as data.tokenizer"
        )


def corpus_format(listing: Listing, files: Iterable[SourceFile], config: DataConfig) -> Format:
    """Return the format of the tables, or "text" if every file is a document."""
    declared = config.format
    if declared in ("csv", *IMAGE_FORMATS):
        raise UserError(
            f"data.format: {declared} is not a format of data.task: language; expected text, or json, parquet or "
            "arrow with a column 'text', or 'prompt' and 'completion', or 'messages'"
        )
    if declared != "auto":
        return declared
    formats: set[Format] = {table_format(file) or "text" for file in files}
    if len(formats) > 1:
        raise UserError(
            f"data: {listing.address!r} mixes {' and '.join(sorted(formats))} files; expected one format, or "
            "data.format: text, with which each file is a document"
        )
    return formats.pop()


def table_format(file: SourceFile) -> Format | None:
    """Return the format of a file if its rows are documents or conversations, else None."""
    return file.known_format if file.known_format in LANGUAGE_TABLES else None


def check_image_settings(listing: Listing, config: DataConfig) -> None:
    for name in FOR_TABLES:
        if getattr(config, name):
            where = repr(listing.address) if listing.address else "the digits data set of scikit-learn"
            raise UserError(f"data.{name}: is for tables, but {where} holds images; remove it")
    if config.task == "regression":
        raise UserError("data.task: regression is for tables, but the data are images; expected auto or classification")


def file_set(listing: Listing, files: Iterable[SourceFile], target: str, fingerprint: str = "") -> FileSet:
    named = [(listing.relative(file), file) for file in files]
    return FileSet(fingerprint or digest_files(named, target), [(name, file.size) for name, file in named])


# Tables in memory


def frame_file(frame: pa.Table | pd.DataFrame, directory: Path) -> str:
    """Write ``frame`` (pandas or Arrow) to a Parquet file in ``directory`` and return its path.

    The name is a digest of the content, so equal tables share the file and cached results. A named index
    becomes a column. Raise ``UserError`` for a column with mixed types or a type that Parquet lacks.
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
            f"data: the frame cannot be converted to a table ({'; '.join(map(str, error.args))}); expected different "
            "names of columns, and one type in each"
        ) from None
