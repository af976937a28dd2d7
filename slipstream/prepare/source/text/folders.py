"""Text files in class folders, made a table of two columns: the text and its class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream.errors import UserError
from slipstream.prepare.columns import value_types
from slipstream.prepare.config import DataConfig
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.source.columnar import LINE, Unit, write_spool
from slipstream.prepare.source.files import Listing, SourceFile
from slipstream.prepare.workers.resume import ResumableScratch

TEXT, CLASS = "text", "class"
#: Files that are read at once, by their size and number.
BLOCK_BYTES = 8 << 20
BLOCK_FILES = 4096
#: A larger file is no text that one row could stand for.
MOST_BYTES = 64 << 20


def as_table(data: Listing, target: str, config: DataConfig) -> tuple[str, DataConfig]:
    """The target and the settings under which ``data`` is a table: other than given if it is text files in class
    folders, which are told from CSV by that no target is named and every file is a ``.txt`` in a folder."""
    if config.format == "auto" and not target:
        in_folders = all("/" in data.relative(file) and file.name.lower().endswith(".txt") for file in data.files)
        config = replace(config, format="text") if in_folders else config
    if config.format != "text":
        return target, config
    if target:
        raise UserError(f"target: {target!r} is not needed, as texts are labelled by their folders; leave it out")
    return CLASS, replace(config, types={**config.types, TEXT: "document"})


@dataclass(frozen=True)
class TextFiles:
    """Some text files with their classes, to become one unit in ``path``; ``first`` is the number of the first."""

    files: tuple[SourceFile, ...]
    classes: tuple[str, ...]
    config: DataConfig
    path: Path


@dataclass(frozen=True)
class TextUnit:
    """What became of them."""

    path: Path
    rows: int
    bad: list[BadRow]

    @property
    def files(self) -> list[Path]:
        return [self.path]


def open_documents(
    data: Listing, files: list[SourceFile], config: DataConfig, place: ResumableScratch
) -> tuple[list[Unit], dict[str, str], list[BadRow]]:
    """The units, the types of the columns and the files set aside. Raises ``UserError`` without class folders."""
    for file in files:
        if "/" not in data.relative(file):
            raise UserError(
                f"{file.uri}: lies in no class folder; expected a directory with one folder of texts for each class, "
                "or data.format: csv for a table"
            )
    units: list[Unit] = []
    bad: list[BadRow] = []
    first = 0
    for piece in place.map(read_files, blocks_of(data, files, config, place.root)):
        if piece.rows:
            units.append(Unit(data.address, str(piece.path), "arrow", 0, piece.rows, first, 0))
        first += piece.rows
        bad += piece.bad
    return units, {TEXT: value_types.TEXT, CLASS: value_types.TEXT}, bad


def blocks_of(data: Listing, files: list[SourceFile], config: DataConfig, scratch: Path) -> Iterator[TextFiles]:
    block: list[SourceFile] = []
    size = number = 0
    for file in [*files, None]:
        full = size >= BLOCK_BYTES or len(block) >= BLOCK_FILES
        if block and (file is None or full):
            classes = tuple(data.relative(member).split("/")[-2] for member in block)
            yield TextFiles(tuple(block), classes, config, scratch / f"text-{number:06d}.arrow")
            block, size, number = [], 0, number + 1
        if file is not None:
            block.append(file)
            size += file.size


def read_files(job: TextFiles) -> TextUnit:
    """Read some files into a unit; what is no text is set aside. Runs in a worker process."""
    rows: list[dict[str, Any]] = []
    bad: list[BadRow] = []
    for file, name in zip(job.files, job.classes, strict=True):
        if file.size > MOST_BYTES:
            bad.append(BadRow(file.uri, 1, "", f"{file.size:,} bytes, more than {MOST_BYTES:,}", ""))
            continue
        with file.open() as stream:
            raw = stream.read()
        try:
            text = raw.decode(job.config.encoding).removeprefix("\ufeff").strip()
            text.encode()  # some codecs give halves of pairs, which are no text
        except UnicodeError as error:
            bad.append(BadRow(file.uri, 1, TEXT, f"not {job.config.encoding} (data.encoding)", str(error)))
            continue
        if text:
            rows.append({TEXT: text, CLASS: name, LINE: 1})
        else:
            bad.append(BadRow(file.uri, 1, TEXT, "the file is empty", ""))
    schema = pa.schema({TEXT: pa.string(), CLASS: pa.string(), LINE: pa.int64()})
    write_spool(job.path, pa.RecordBatch.from_pylist(rows, schema))
    return TextUnit(job.path, len(rows), bad)
