"""Text files as documents: in class folders, and the modules of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.source.columnar import LINE, TableInput, Unit, write_spool
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import FOLDER, DataConfig
from slipstream.shared.source.files import Listing, SourceFile, list_source, local_file
from slipstream.shared.source.given_splits import folder_name
from slipstream.shared.source.quarantine import BadRow, QuarantinedRows
from slipstream.shared.source.resolved import CLASS, TEXT, ResolvedSource, class_folders

#: Limits on the size in bytes and the number of files of a block, the job of one worker.
BLOCK_BYTES = 8 << 20
BLOCK_FILES = 4096
#: Largest text file in bytes; larger ones are quarantined.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class TextFiles:
    """Job of one worker: text files and their classes, to be written to ``path`` as one unit."""

    files: tuple[SourceFile, ...]
    classes: tuple[str, ...]
    encoding: str
    path: Path
    #: First folder of every file, if it names the split.
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextUnit:
    """Unit written by one worker, and the quarantined files."""

    path: Path
    rows: int
    bad: QuarantinedRows

    @property
    def files(self) -> list[Path]:
        return [self.path, *self.bad.spools]


def open_documents(source: ResolvedSource, scratch: ResumableScratch) -> TableInput:
    """Convert text files to a table in ``scratch``, one row per file; raise ``UserError`` without class folders."""
    class_folders(source, "texts", ", or data.format: csv for a table")
    units: list[Unit] = []
    bad = QuarantinedRows()
    first = 0
    for piece in scratch.map(read_files, blocks_of(source, scratch.root)):
        if piece.rows:
            units.append(Unit(source.address, str(piece.path), "arrow", 0, piece.rows, first, 0))
        first += piece.rows
        bad += piece.bad
    types = {TEXT: value_types.TEXT, CLASS: value_types.TEXT}
    if source.config.split.directories:
        types[FOLDER] = value_types.TEXT
    return TableInput(units, types, first + len(bad), bad)


def blocks_of(source: ResolvedSource, scratch: Path) -> Iterator[TextFiles]:
    block: list[SourceFile] = []
    size = number = 0
    for file in [*source.files, None]:
        full = size >= BLOCK_BYTES or len(block) >= BLOCK_FILES
        if block and (file is None or full):
            classes = tuple(source.listing.relative(member).split("/")[-2] for member in block)
            given = block if source.config.split.directories else []
            folders = tuple(folder_name(source.listing, member) for member in given)
            path = scratch / f"text-{number:06d}.arrow"
            yield TextFiles(tuple(block), classes, source.config.encoding, path, folders)
            block, size, number = [], 0, number + 1
        if file is not None:
            block.append(file)
            size += file.size


def read_files(job: TextFiles) -> TextUnit:
    """Write the texts of a job as one unit; quarantine files that are not text. Runs in a worker process."""
    rows: list[dict[str, object]] = []
    bad: list[BadRow] = []
    for number, (file, name) in enumerate(zip(job.files, job.classes, strict=True)):
        text = read_text(file, job.encoding)
        if isinstance(text, BadRow):
            bad.append(text)
        else:
            folder = {FOLDER: job.folders[number]} if job.folders else {}
            rows.append({TEXT: text, CLASS: name, LINE: 1, **folder})
    folders = {FOLDER: pa.string()} if job.folders else {}
    schema = pa.schema({TEXT: pa.string(), CLASS: pa.string(), LINE: pa.int64(), **folders})
    write_spool(job.path, pa.RecordBatch.from_pylist(rows, schema))
    return TextUnit(job.path, len(rows), QuarantinedRows.spooled(bad, job.path.with_suffix(".bad")))


def read_text(file: SourceFile, encoding: str) -> str | BadRow:
    """Return the text of a file, or a bad row with the reason why it has none."""
    if file.size > MOST_BYTES:
        return BadRow(file.uri, 1, "", f"{file.size:,} bytes, more than {MOST_BYTES:,}", "")
    with file.open() as stream:
        raw = stream.read()
    try:
        text = raw.decode(encoding).removeprefix("\ufeff").strip()
        text.encode()  # some codecs decode to lone surrogates, which are not text
    except UnicodeError as error:
        return BadRow(file.uri, 1, TEXT, f"not {encoding} (data.encoding)", str(error))
    return text or BadRow(file.uri, 1, TEXT, "the file is empty", "")


ADDRESS = "Python's standard library"
#: Skipped directories: tests repeat each other, and installed packages differ between machines.
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "__pycache__")


def list_data(address: str, target: str, config: DataConfig) -> Listing:
    """List the files at an address; raise ``UserError`` if there are none.

    Without an address, the data is the standard library for language, else scikit-learn's digits.
    """
    if config.task == "language" and not address:
        return list_standard_library()
    return list_source(address, target, config)


def list_standard_library() -> Listing:
    folder = Path(sysconfig.get_path("stdlib"))
    return Listing(ADDRESS, tuple(local_file(path) for path in sorted(modules_below(folder))), str(folder))


def modules_below(folder: Path) -> Iterator[Path]:
    for current, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(current, name) for name in names if name.endswith(".py"))
