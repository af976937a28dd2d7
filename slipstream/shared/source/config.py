"""Settings of the data."""

from __future__ import annotations

import codecs
from dataclasses import field
from datetime import UTC, date, datetime
from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.settings import LATER, Seed, Settings, settings
from slipstream.shared.spelling import NO_NUMBER, NO_TEXT

#: Column of a table that holds the first folder of every file, if that names the split.
FOLDER = "(folder)"


@settings
class SplitConfig(Settings):
    """Held-out rows: a fraction chosen by a stable hash of id, group or content, or the latest rows by time."""

    section = "data.split"

    validation: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of rows for the validation split, which decides when training stops."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of rows for the test split, on which the trained model is measured."""
    seed: Seed = 0
    """Seed of the split; another seed holds out other rows."""
    validation_from: Annotated[str, NO_TEXT] = ""
    """Time (ISO 8601) at which the validation split starts; it ends at test_from. Needs data.time. null: the latest
    rows, by the fractions above."""
    test_from: Annotated[str, NO_TEXT] = ""
    """Time (ISO 8601) at which the test split starts. Needs data.time; null if validation_from is null."""
    directories: Annotated[bool, LATER] = False
    """Take the split from the name of the first folder: train or training; val, valid, validation or dev; test. A
    missing validation or test split is drawn from the training rows, by its fraction above."""
    column: Annotated[str, NO_TEXT, LATER] = ""
    """Column of a table that names the split in the same way. Never a feature. null: none."""

    def check(self) -> None:
        if self.directories and self.column:
            raise self.reject("column", "none with data.split.directories")
        if self.is_given and (self.validation_from or self.test_from):
            name = "validation_from" if self.validation_from else "test_from"
            raise self.reject(name, "none with a given split")
        for name in ("validation_from", "test_from"):
            if getattr(self, name) and seconds_of(getattr(self, name)) is None:
                raise self.reject(name, 'a date or time such as "2024-06-30" or "2024-06-30T12:00:00"')
        if bool(self.validation_from) != bool(self.test_from):
            raise self.reject("test_from" if self.validation_from else "validation_from", "both times or neither")
        if self.test_from and not self.cuts[0] < self.cuts[1]:
            raise self.reject("test_from", f"a time after validation_from, {self.validation_from}")
        if self.validation + self.test >= 1:
            raise self.reject("test", f"less than {1 - self.validation:g}, so that rows are left to train on")

    @property
    def is_given(self) -> bool:
        """True if the data name their splits."""
        return self.directories or bool(self.column)

    @property
    def named_by(self) -> str:
        """Column of a table that names the split; "" without."""
        return FOLDER if self.directories else self.column

    @property
    def cuts(self) -> tuple[float, float]:
        """Times ``validation_from`` and ``test_from`` in seconds since 1970 (UTC); 0 if empty."""
        return seconds_of(self.validation_from) or 0.0, seconds_of(self.test_from) or 0.0


def seconds_of(text: str) -> float | None:
    """Return an ISO 8601 time (default zone UTC) in seconds since 1970; ``None`` if it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


#: Allowed values of ``data.format``.
Format = Literal["auto", "csv", "parquet", "arrow", "json", "images", "arrays", "text"]
#: Allowed values of ``data.types``.
ColumnType = Literal["number", "date", "day-first date", "month-first date", "boolean", "text", "category", "document"]


@settings
class DataConfig(Settings):
    """Settings for reading raw data; the defaults suit an ordinary table with a header."""

    section = "data"

    format: Format = "auto"
    """Format of the data; "auto" uses the file's extension."""
    header: bool = True
    """Whether the first line of a CSV names the columns."""
    columns: list[str] = field(default_factory=list)
    """Names of the columns, for a CSV without a header."""
    delimiter: Annotated[str, NO_TEXT] = ""
    """Delimiter of the fields of a CSV. null: a tab in .tsv, else a comma; or ";", "|" or a tab if the first lines are
    unambiguous, which is logged."""
    quote: Annotated[str, NO_TEXT] = '"'
    """Character around values with delimiters or line breaks, doubled inside them. null: no quoting."""
    escape: Annotated[str, NO_TEXT] = ""
    """Character before a quote or delimiter that is part of a value, if quotes are not doubled; null: none."""
    encoding: str = "utf-8"
    """Encoding of a CSV."""
    missing: list[str] = field(default_factory=lambda: ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"])
    """Cells that mean "missing", compared after surrounding spaces are removed; numbers and times by their values."""
    decimal: Literal[".", ","] = "."
    """Decimal mark of numbers in text."""
    thousands: Annotated[Literal["", ",", ".", " ", "'", "_"], NO_TEXT] = ""
    """Thousands separator of numbers in text; null: none."""
    dates: Annotated[Literal["", "day-first", "month-first"], NO_TEXT] = ""
    """Order of dates such as 1/2/2024 in columns that do not show it; null: such columns are read as text."""
    types: dict[str, ColumnType] = field(default_factory=dict)
    """Types of columns that should not be inferred: "number", "date" (ISO 8601, UTC unless stated otherwise, or with
    the year last), "day-first date", "month-first date", "boolean", "text", "category" (an input, whatever its values
    look like) or "document" (learned from by its words). A row with a value of another type is quarantined."""
    drop: list[str] = field(default_factory=list)
    """Columns to ignore."""
    id: Annotated[str, NO_TEXT] = ""
    """Column that identifies a row; never a feature. null: none."""
    group: Annotated[str, NO_TEXT] = ""
    """Column whose equal values stay in one split, such as a customer's number. Never a feature. null: none."""
    time: Annotated[str, NO_TEXT] = ""
    """Column of times for a split by time: the oldest rows train, the latest test. Never a feature. null:
    no split by time."""
    weight: Annotated[str, NO_TEXT] = ""
    """Column with the rows' weights in the training loss: 2 counts as the row twice, 0 not at all. Never a feature, and
    not hashed when a row's content decides its split. Evaluation is unweighted.
    null: every row counts once."""
    task: Literal["auto", "classification", "regression", "language"] = "auto"
    """Learning task: "auto" takes a text target, or a numeric one with few distinct whole values, as classes;
    "language" reads files as documents, or a column "text", or conversations, and learns to predict the next token."""
    tokenizer: Annotated[str, Field(min_length=1)] = "train"
    """For language: "train" (byte-level BPE, from the training split), "bytes", or the directory of a tokenizer."""
    answers: Literal["auto", "each"] = "auto"
    """Answers of a conversation that are learned: "auto" takes those that the chat template marks, else all, else (if
    the template shows answers differently once others follow) the last one; "each" makes a row up to every answer."""
    date: str = "2024-07-26"
    """For language: the date that chat templates get as today's, so that texts do not depend on the day. The default is
    the date that Llama's templates use without a clock."""
    vocabulary: Annotated[int, Field(ge=260, le=1 << 24)] = 8192
    """Number of token ids of a tokenizer that is trained here; short texts give fewer."""
    length: Annotated[int, Field(ge=2, le=1 << 20)] = 512
    """For language: number of tokens per row. Documents are packed into rows; a longer conversation is quarantined."""
    across_documents: bool = False
    """Whether documents in the same row attend to each other; otherwise a document attends only to itself."""
    image_size: list[Annotated[int, Field(ge=1, le=1 << 14)]] = field(default_factory=list)
    """Size [height, width] to which image files are resized. Empty: unchanged; all must then have the same size."""
    image_channels: Annotated[Literal[0, 1, 3], NO_NUMBER] = 0
    """Channels to which image files are converted: 1 grey, 3 RGB; null: unchanged; all must then have the same
    channels."""
    text_length: Annotated[int, Field(ge=8, le=8192)] = 256
    """Number of words and word pairs that are kept of a document."""
    quarantine_limit: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of rows that may be quarantined before the run stops."""
    memory: Annotated[float, Field(ge=0.25)] = 1.5
    """Memory of each process for data, in GiB. Less means smaller batches, samples and counts, and so different last
    digits; the same setting gives the same bytes on every machine."""
    earlier: Annotated[str, NO_TEXT] = ""
    """Earlier prepared data of the same table (a directory or a store's address): its statistics are used, its rows are
    unchanged, and only new files are prepared, as further segments. null: none."""
    shuffle: bool = True
    """Whether rows are stored in random order; false keeps their order, for data that is random already."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Which rows are held out for validation and test."""

    @property
    def identities(self) -> list[str]:
        """Columns whose first value alone decides a row's split; none if the time does."""
        return [] if self.time else [name for name in (self.group, self.id) if name]

    def check(self) -> None:
        if not is_text_encoding(self.encoding):
            raise self.reject("encoding", 'a name of a text encoding such as "utf-8", "latin-1" or "cp1252"')
        if not is_date(self.date):
            raise self.reject("date", 'a date such as "2024-07-26"')
        if self.group and self.time:
            raise self.reject("group", "a group or a time to split by, not both")
        if self.time and self.split.is_given:
            raise self.reject("time", "none with a given split")
        if self.split.column and self.split.column in (self.id, self.group, self.weight):
            raise self.split.reject("column", "another column than data.id, data.group or data.weight")
        if self.weight and self.weight in (self.id, self.group, self.time):
            raise self.reject("weight", "another column than data.id, data.group or data.time")
        if self.split.test_from and not self.time:
            raise self.reject("time", "the column that split.test_from refers to")
        if self.image_size and len(self.image_size) != 2:
            raise self.reject("image_size", "two whole numbers, [height, width]")
        if self.decimal == self.thousands:
            raise self.reject("thousands", "another mark than data.decimal")
        marks = {"delimiter": self.delimiter or ",", "quote": self.quote, "escape": self.escape}
        for name, mark in marks.items():
            if mark and (len(mark) != 1 or not mark.isascii() or mark in "\r\n\0"):
                raise self.reject(name, "one ASCII character or null")
            if mark and mark in [taken for other, taken in marks.items() if other != name]:
                raise self.reject(name, "another character than the other marks of the file")


def is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_text_encoding(name: str) -> bool:
    """Return True if Python has a text encoding of this name that is usable for files."""
    try:
        codec = codecs.lookup(name)
        decoded = codec.incrementaldecoder().decode(b"", final=True)
    except (LookupError, ValueError, TypeError, AttributeError):
        return False
    # These codecs of Python produce text but are not file encodings.
    return decoded == "" and codec.name not in ("punycode", "undefined", "idna", "rot13")
