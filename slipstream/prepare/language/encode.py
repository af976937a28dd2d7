"""The second pass: every document of a spool becomes token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.artifacts.prepared.documents import SCHEMA, Document, table_of
from slipstream.language.tokenizer import Tokenizer
from slipstream.prepare.language.read import spooled
from slipstream.source.quarantine import BadRow

#: Documents whose ids are held at a time.
AT_ONCE = 1024


@dataclass(frozen=True)
class EncodeJob:
    """``kept`` is by split the share of the documents that are kept whole beside the rows."""

    spool: Path
    tokenizer: Path
    dtype: str
    length: int
    kept: list[float]
    directory: Path


@dataclass(frozen=True)
class EncodedPiece:
    """The tokens of a piece: of each split a file of so many ``tokens``, and the documents that are kept whole."""

    directory: Path
    tokens: list[int]
    learned: list[int]
    bad: list[BadRow]

    def path(self, split: int) -> Path:
        return self.directory / f"{SPLITS[split]}.tokens"

    @property
    def documents(self) -> Path:
        return self.directory / "documents.arrow"

    @property
    def files(self) -> list[Path]:
        return [*(self.path(split) for split in range(len(SPLITS))), self.documents]


@lru_cache(maxsize=1)
def tokenizer_at(path: Path) -> Tokenizer:
    """The tokenizer whose files are in a JSON file."""
    return Tokenizer(json.loads(path.read_bytes()))


def encode(job: EncodeJob) -> EncodedPiece:
    """Write the tokens of a spool: of each document its own and the end token. Runs in a worker process."""
    tokenizer, spool = tokenizer_at(job.tokenizer), spooled(job.spool)
    job.directory.mkdir(exist_ok=True)
    piece = EncodedPiece(job.directory, [0] * len(SPLITS), [0] * len(SPLITS), [])
    kept = []
    for split in range(len(SPLITS)):
        rows = spool.filter(pc.equal(spool["split"], split))
        with piece.path(split).open("wb") as file:
            for start in range(0, len(rows), AT_ONCE):
                batch = rows.slice(start, AT_ONCE)
                texts = batch["text"].to_pylist()
                names, places = batch["name"].to_pylist(), batch["place"].to_pylist()
                for ids, text, name, place in zip(tokenizer.documents(texts), texts, names, places, strict=True):
                    ended = np.append(ids, tokenizer.end).astype(job.dtype)
                    file.write(ended.data)
                    piece.tokens[split] += len(ended)
                    if place < job.kept[split]:
                        whole = np.append(tokenizer.end, ended) if SPLITS[split] == "test" else ended[:0]
                        kept.append(Document(name, SPLITS[split], [text], whole.astype(np.int32)))
        piece.learned[split] = piece.tokens[split]
    with pa.ipc.new_file(piece.documents, SCHEMA) as file:
        file.write_table(table_of(kept))
    return piece
