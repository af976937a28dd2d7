"""What can be set about the data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from tasks.settings import Settings, setting


@dataclass(frozen=True)
class SplitConfig(Settings):
    """Which rows are held out: a share of them by a stable hash of id, group or content, or the latest by time."""

    section = "data.split"

    validation: float = setting(0.15, above=0, below=1)
    test: float = setting(0.15, above=0, below=1)
    seed: int = setting(0, at_least=0)
    #: With data.time: rows from these times on (ISO 8601) are held out. Empty: the latest rows, by the shares above.
    validation_from: str = ""
    test_from: str = ""

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
    """An ISO 8601 time, UTC unless it says otherwise, in seconds since 1970; ``None`` if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


#: What data.types may say.
TYPES = ("number", "date", "boolean", "text", "category", "document")


@dataclass(frozen=True)
class DataConfig(Settings):
    """How raw data is read. For an ordinary table with a header the defaults are enough."""

    section = "data"

    #: "auto" goes by the file's extension.
    format: str = setting("auto", choices=("auto", "csv", "parquet", "arrow", "json", "images", "arrays", "text"))
    #: Whether the first line of a CSV names the columns.
    header: bool = True
    #: Names of the columns, for a CSV without a header.
    columns: list[str] = setting([])
    #: What separates the fields of a CSV. Empty: a tab in .tsv, else a comma; or ";", "|" or a tab if the first lines
    #: leave no doubt, which is said.
    delimiter: str = ""
    #: What surrounds values that hold delimiters or line breaks, doubled inside them. Empty: nothing does.
    quote: str = '"'
    #: What goes before a quote or delimiter that is part of a value, where they are not doubled.
    escape: str = ""
    encoding: str = "utf-8"
    #: Cells that mean "missing", compared after surrounding spaces are removed.
    missing: list[str] = setting(["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"])
    #: The mark between whole and fraction of a number in text, and the one between its thousands (empty: none).
    decimal: str = setting(".", choices=(".", ","))
    thousands: str = setting("", choices=("", ",", ".", " ", "'", "_"))
    #: What columns hold, where that is not to be worked out: "number", "date" (ISO 8601, UTC unless it says otherwise),
    #: "boolean", "text", "category" (an input whatever its values look like) or "document" (learned from by its words).
    #: A value that is no such thing puts its row into quarantine.
    types: dict[str, str] = setting({}, choices=TYPES)
    #: Columns to leave out.
    drop: list[str] = setting([])
    #: The column that identifies a row; never a feature.
    id: str = ""
    #: The column whose values stay together: all rows of a customer, say, fall into one split. Never a feature.
    group: str = ""
    #: The column by which rows are split in time instead: older rows train, the latest test. Never a feature.
    time: str = ""
    #: The column of numbers by which rows weigh in the training loss: 2 counts as the row twice, 0 not at all. Never a
    #: feature, and no part of a row's content when that decides its split. Evaluation does not weigh.
    weight: str = ""
    #: "auto" takes a text target, or a numeric one with few distinct whole values, as classes.
    task: str = setting("auto", choices=("auto", "classification", "regression"))
    #: Images as files are brought to this [height, width] and number of channels (1 grey, 3 RGB). Empty and 0: they are
    #: taken as they are, and must then be alike.
    image_size: list[int] = setting([], at_least=1)
    image_channels: int = setting(0, choices=(0, 1, 3))
    #: Words and pairs of words that are kept of a document.
    text_length: int = setting(256, at_least=8, at_most=8192)
    #: The share of rows that may be set aside as unreadable before the run stops.
    quarantine_limit: float = setting(0.01, at_least=0, at_most=1)
    #: GiB that each process may take for data. Less means smaller batches, samples and counts, and so other last
    #: digits; the same setting gives the same bytes on any machine.
    memory: float = setting(1.5, at_least=0.25)
    #: An earlier prepared set of the same table (a directory or an s3:// address): its statistics are taken, its rows
    #: stay as they are, and only files that it has not seen are prepared, into further segments.
    earlier: str = ""
    #: Whether rows are stored in random order. Off keeps their order, for data that is random already.
    shuffle: bool = True
    split: SplitConfig = SplitConfig()

    def check(self) -> None:
        if self.group and self.time:
            raise self.reject("group", "a group or a time to split by, not both")
        if self.weight and self.weight in (self.id, self.group, self.time):
            raise self.reject("weight", "another column than data.id, data.group or data.time")
        if self.split.test_from and not self.time:
            raise self.reject("time", "the column that split.test_from is about")
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
