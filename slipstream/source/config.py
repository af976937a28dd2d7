"""Settings of the data."""

from __future__ import annotations

import codecs
from dataclasses import field
from datetime import UTC, date, datetime
from typing import Annotated, Literal

from pydantic import Field

from slipstream.settings import Seed, Settings, settings


@settings
class SplitConfig(Settings):
    """Held-out rows: a share by a stable hash of id, group or content, or the latest by time."""

    section = "data.split"

    validation: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The share of rows by which training decides when to stop."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The share of rows that the trained model is measured on."""
    seed: Seed = 0
    """Another seed holds out other rows."""
    validation_from: str = ""
    """With data.time: rows from this time on (ISO 8601), up to test_from, are the validation split. Empty: the latest
    rows, by the shares above."""
    test_from: str = ""
    """With data.time: rows from this time on (ISO 8601) are the test split."""

    def check(self) -> None:
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
    def cuts(self) -> tuple[float, float]:
        """The two times in seconds since 1970 (UTC)."""
        return seconds_of(self.validation_from) or 0.0, seconds_of(self.test_from) or 0.0


def seconds_of(text: str) -> float | None:
    """Return an ISO 8601 time (default zone UTC) in seconds since 1970; ``None`` if it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


#: Values of data.format.
Format = Literal["auto", "csv", "parquet", "arrow", "json", "images", "arrays", "text"]
#: Values of data.types.
ColumnType = Literal["number", "date", "boolean", "text", "category", "document"]


@settings
class DataConfig(Settings):
    """Settings for reading raw data; the defaults suit an ordinary table with a header."""

    section = "data"

    format: Format = "auto"
    """What the data is; "auto" goes by the file's extension."""
    header: bool = True
    """Whether the first line of a CSV names the columns."""
    columns: list[str] = field(default_factory=list)
    """Names of the columns, for a CSV without a header."""
    delimiter: str = ""
    """What separates the fields of a CSV. Empty: a tab in .tsv, else a comma; or ";", "|" or a tab if the first lines
    leave no doubt, which is said."""
    quote: str = '"'
    """What surrounds values that hold delimiters or line breaks, doubled inside them. Empty: nothing does."""
    escape: str = ""
    """What goes before a quote or delimiter that is part of a value, where they are not doubled."""
    encoding: str = "utf-8"
    """The encoding of a CSV."""
    missing: list[str] = field(default_factory=lambda: ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"])
    """Cells that mean "missing", compared after surrounding spaces are removed; numbers and times by their values."""
    decimal: Literal[".", ","] = "."
    """The mark between whole and fraction of a number in text."""
    thousands: Literal["", ",", ".", " ", "'", "_"] = ""
    """The mark between the thousands of a number in text; empty: none."""
    types: dict[str, ColumnType] = field(default_factory=dict)
    """What columns hold, where that is not to be worked out: "number", "date" (ISO 8601, UTC unless it says otherwise),
    "boolean", "text", "category" (an input whatever its values look like) or "document" (learned from by its words).
    A value that is no such thing puts its row into quarantine."""
    drop: list[str] = field(default_factory=list)
    """Columns to leave out."""
    id: str = ""
    """The column that identifies a row; never a feature."""
    group: str = ""
    """The column whose values stay together: all rows of a customer, say, fall into one split. Never a feature."""
    time: str = ""
    """The column by which rows are split in time instead: older rows train, the latest test. Never a feature."""
    weight: str = ""
    """The column of numbers by which rows weigh in the training loss: 2 counts as the row twice, 0 not at all. Never a
    feature, and no part of a row's content when that decides its split. Evaluation does not weigh."""
    task: Literal["auto", "classification", "regression", "language"] = "auto"
    """What is learned: "auto" takes a text target, or a numeric one with few distinct whole values, as classes;
    "language" takes files as documents, or a column "text", or conversations, and learns each next token."""
    tokenizer: Annotated[str, Field(min_length=1)] = "train"
    """Of language: "train" (byte-level BPE, from the training split), "bytes", or the directory of one."""
    date: str = "2024-07-26"
    """Of language: the date that chat templates are given as today's, so that no text depends on the day; by default
    the one that Llama's templates have without a clock."""
    vocabulary: Annotated[int, Field(ge=260, le=1 << 24)] = 8192
    """Token ids of a tokenizer that is trained here; of little text there are fewer."""
    length: Annotated[int, Field(ge=2, le=1 << 20)] = 512
    """Of language: the tokens of a row. Documents are packed into rows; a longer conversation is set aside."""
    across_documents: bool = False
    """Whether documents that share a row attend to each other; off, each attends to itself alone."""
    image_size: list[Annotated[int, Field(ge=1, le=1 << 14)]] = field(default_factory=list)
    """The [height, width] that images as files are brought to. Empty: as they are, and they must then be alike."""
    image_channels: Literal[0, 1, 3] = 0
    """The channels that images as files are brought to: 1 grey, 3 RGB; 0 as they are, and they must then be alike."""
    text_length: Annotated[int, Field(ge=8, le=8192)] = 256
    """Words and pairs of words that are kept of a document."""
    quarantine_limit: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The share of rows that may be set aside as unreadable before the run stops."""
    memory: Annotated[float, Field(ge=0.25)] = 1.5
    """GiB that each process may take for data. Less means smaller batches, samples and counts, and so other last
    digits; the same setting gives the same bytes on any machine."""
    earlier: str = ""
    """An earlier prepared set of the same table (a directory or a store's address): its statistics are taken, its rows
    stay as they are, and only files that it has not seen are prepared, into further segments."""
    shuffle: bool = True
    """Whether rows are stored in random order. Off keeps their order, for data that is random already."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Which rows are held out."""

    @property
    def identity(self) -> str:
        """The column that alone decides the split of a row; empty if the content or the time does."""
        return "" if self.time else self.group or self.id

    def check(self) -> None:
        if not is_text_encoding(self.encoding):
            raise self.reject("encoding", 'a name of a text encoding such as "utf-8", "latin-1" or "cp1252"')
        if not is_date(self.date):
            raise self.reject("date", 'a date such as "2024-07-26"')
        if self.group and self.time:
            raise self.reject("group", "a group or a time to split by, not both")
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
                raise self.reject(name, "one ASCII character or none")
            if mark and mark in [taken for other, taken in marks.items() if other != name]:
                raise self.reject(name, "another character than the other marks of the file")


def is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_text_encoding(name: str) -> bool:
    """Return True if Python has an incremental decoder to text by this name, which raises errors."""
    try:
        codec = codecs.lookup(name)
        decoded = codec.incrementaldecoder().decode(b"", final=True)
    except (LookupError, ValueError, TypeError, AttributeError):
        return False
    # These codecs of Python produce text but are not file encodings.
    return decoded == "" and codec.name not in ("punycode", "undefined", "idna", "rot13")
