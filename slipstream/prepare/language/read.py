"""The first pass over a corpus: every piece becomes a spool of documents, each with its split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.language.chat_template import CannotRender, ChatTemplate, messages_of, template_of
from slipstream.language.tokenizer import Tokenizer
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
        # Of a conversation, whose text is rendered: where in it answers begin and end, and what they are.
        ("spans", pa.list_(pa.int64())),
        ("answers", pa.list_(pa.large_string())),
    ]
)


@dataclass(frozen=True)
class ReadJob:
    """``tokenizer`` are the files of the one that has the chat template of conversations."""

    piece: Piece
    config: DataConfig
    path: Path
    tokenizer: dict[str, str] = field(default_factory=dict)


class Text(NamedTuple):
    """A document, or a conversation that was rendered, of which only the ``answers`` are learned. ``content`` is what
    the user gave of it, which decides its split, whatever template renders it."""

    record: Record
    content: str
    text: str
    spans: list[int]
    answers: list[str]


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
    texts: list[Text] = []
    bad: list[BadRow] = []
    lines = 0
    template = template_of(job.tokenizer) if job.piece.shape != "text" else None
    specials = Tokenizer(job.tokenizer).specials if template else []
    for found in read_piece(job.piece, job.config.encoding):
        lines = found.line
        if isinstance(found, BadRow):
            bad.append(found)
        elif isinstance(found, Record):
            try:
                texts.append(rendered(found, template, specials) if template else document(found))
            except CannotRender as error:
                raw = repr(found.values.get(job.piece.shape))
                bad.append(BadRow(found.file, found.line, job.piece.shape, str(error), raw))
    hashes = np.array([xxhash.xxh3_64_intdigest(each.content.encode()) for each in texts], np.uint64)
    splits = assign(hashes, job.config.split)
    sizes = np.array([len(each.text.encode()) for each in texts], np.int64)
    columns = {
        "name": [each.record.file for each in texts],
        "line": [each.record.line for each in texts],
        "split": splits,
        "place": (splitmix64(hashes ^ SAMPLE_SEED) >> np.uint64(11)) * 2.0**-53,
        "text": [each.text for each in texts],
        "spans": [each.spans for each in texts],
        "answers": [each.answers for each in texts],
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


def document(record: Record) -> Text:
    """Raises :class:`CannotRender` for a row that has no text."""
    text = record.values.get("text")
    if not isinstance(text, str):
        raise CannotRender("no text")
    try:
        text.encode()
    except UnicodeError:
        raise CannotRender("half of a surrogate pair, which is no text") from None
    if not text:
        raise CannotRender("the text is empty")
    return Text(record, text, text, [], [])


def rendered(record: Record, template: ChatTemplate, specials: Sequence[str]) -> Text:
    """Raises :class:`CannotRender` for a row that is no conversation, or in which a message spells a special token: as
    text of the template it would end the turn."""
    messages = messages_of(record.values)
    for message in messages:
        document(Record(record.file, record.line, {"text": message["content"] or " "}))
        if spelled := next((special for special in specials if special in message["content"]), None):
            raise CannotRender(f"a message spells the special token {spelled!r}")
    found = template.render(messages)
    content = json.dumps(messages, ensure_ascii=False)
    return Text(record, content, found.text, [place for span in found.spans for place in span], found.answers)


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
