"""The first pass over a corpus: every piece becomes a spool of documents, each with its split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.fit.splits import assign
from slipstream.prepare.language.corpus import Piece, Record, read_piece
from slipstream.source.columns.hashing import splitmix64
from slipstream.source.config import DataConfig
from slipstream.source.quarantine import BadRow

#: Of the documents that are kept whole beside the rows; another one than that of the splits.
SAMPLE_SEED = np.uint64(0x5EED)
SPOOL = pa.schema(
    [
        ("name", pa.string()),
        ("line", pa.int64()),
        ("split", pa.uint8()),
        ("place", pa.float64()),
        ("text", pa.large_string()),
    ]
)


@dataclass(frozen=True)
class ReadJob:
    piece: Piece
    config: DataConfig
    path: Path


@dataclass(frozen=True)
class ReadPiece:
    """What became of a piece: a spool of so many ``documents`` and ``bytes`` by split. ``lines`` counts those of JSON
    Lines, by which the lines of later pieces of the file are found; ``hashes`` are of the contents (uint64)."""

    path: Path
    file: str
    lines: int
    documents: list[int]
    bytes: list[int]
    hashes: np.ndarray
    bad: list[BadRow] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        return [self.path]


def read(job: ReadJob) -> ReadPiece:
    """Read, hash and split a piece. Runs in a worker process."""
    records: list[Record] = []
    bad: list[BadRow] = []
    lines = 0
    for found in read_piece(job.piece, job.config.encoding):
        lines = found.line
        text = found.values["text"] if isinstance(found, Record) and "text" in found.values else None
        if isinstance(found, BadRow):
            bad.append(found)
        elif not isinstance(text, str):
            bad.append(BadRow(found.file, found.line, "text", "no text", repr(text)))
        elif not text:
            bad.append(BadRow(found.file, found.line, "text", "the text is empty", ""))
        else:
            records.append(found)
    texts = [record.values["text"] for record in records]
    encoded = [text.encode() for text in texts]
    hashes = np.array([xxhash.xxh3_64_intdigest(text) for text in encoded], np.uint64)
    splits = assign(hashes, job.config.split)
    sizes = np.array([len(text) for text in encoded], np.int64)
    columns = {
        "name": [record.file for record in records],
        "line": [record.line for record in records],
        "split": splits,
        "place": (splitmix64(hashes ^ SAMPLE_SEED) >> np.uint64(11)) * 2.0**-53,
        "text": texts,
    }
    with pa.ipc.new_file(job.path, SPOOL) as spool:
        spool.write_table(pa.Table.from_pydict(columns, SPOOL))
    return ReadPiece(
        path=job.path,
        file=job.piece.files[0].uri,
        lines=lines,
        documents=np.bincount(splits, minlength=len(SPLITS)).tolist(),
        bytes=[int(sizes[splits == split].sum()) for split in range(len(SPLITS))],
        hashes=hashes,
        bad=bad,
    )


def spooled(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def first_lines(pieces: list[Piece], units: list[ReadPiece]) -> list[int]:
    """How many lines of its file lie before each piece of JSON Lines; of others their lines say it."""
    before, of_file = [], dict[str, int]()
    for piece, unit in zip(pieces, units, strict=True):
        before.append(of_file.get(unit.file, 0) if piece.format == "json" else 0)
        of_file[unit.file] = of_file.get(unit.file, 0) + unit.lines
    return before


def moved(bad: list[BadRow], lines: int) -> Iterator[BadRow]:
    """The same with so many lines before."""
    return (replace(row, line=row.line + lines) for row in bad)
