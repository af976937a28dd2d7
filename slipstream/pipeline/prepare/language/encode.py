"""Second pass over language: encode every document and conversation as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.pipeline.prepare.fit.splits import TEST
from slipstream.pipeline.prepare.language.read import read_spool
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.artifacts.prepared.documents import SCHEMA, Document, documents_table
from slipstream.shared.artifacts.prepared.token_rows import not_learned
from slipstream.shared.language.tokenizer import LearnedSpans, Tokenizer
from slipstream.shared.source.quarantine import BadRow

#: Number of documents encoded at once.
AT_ONCE = 1024


@dataclass(frozen=True)
class EncodeDocumentsJob:
    """Job of one worker: encode the documents in ``spool``, and store the shares ``kept`` of every split unchanged."""

    spool: Path
    tokenizer: Path
    dtype: str
    length: int
    kept: list[float]
    directory: Path


@dataclass(frozen=True)
class EncodedChunk:
    """Tokens of a chunk, in one file per split, and the documents stored unchanged.

    ``tokens`` counts all tokens by split, ``learned`` those with loss. For conversations a file has one row per
    conversation, without ``bad`` ones.
    """

    directory: Path
    tokens: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    learned: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    bad: list[BadRow] = field(default_factory=list)
    bad_by_split: list[int] = field(default_factory=lambda: [0] * len(SPLITS))

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
    """Return the tokenizer whose files are stored in the JSON file ``path``."""
    return Tokenizer(json.loads(path.read_bytes()))


def encode_documents(job: EncodeDocumentsJob) -> EncodedChunk:
    """Write the tokens of every document; runs in a worker process.

    The end token of a document is the start of the next one, unless the tokenizer puts other tokens in front.
    """
    tokenizer, piece, kept = tokenizer_at(job.tokenizer), begun(job), list[Document]()
    front, ends_start = len(tokenizer.front), not has_own_start(tokenizer)
    for split in range(len(SPLITS)):
        with piece.path(split).open("wb") as file:
            for rows in batches(job.spool, split):
                texts = [row["text"] for row in rows]
                for ids, row in zip(tokenizer.documents(texts), rows, strict=True):
                    # Of several tokens in front, the first is the context of the others, which are not learned.
                    ids[1:front] = not_learned(ids[1:front])
                    stored = ids[1:].copy() if ends_start else np.append(not_learned(ids[:1]), ids[1:])
                    file.write(stored.astype(job.dtype).data)
                    piece.tokens[split] += len(stored)
                    piece.learned[split] += int((stored >= 0).sum())
                    if row["place"] < job.kept[split]:
                        whole = ids if split == TEST else ids[:0]
                        kept.append(Document(row["name"], SPLITS[split], [row["text"]], whole))
    write_kept(piece, kept)
    return piece


def has_own_start(tokenizer: Tokenizer) -> bool:
    return tokenizer.front not in ([], [tokenizer.end])


def encode_conversations(job: EncodeDocumentsJob) -> EncodedChunk:
    """Write every conversation as one row, padded with end tokens that do not count in the loss.

    A conversation longer than a row is quarantined, never cut. Runs in a worker process.
    """
    tokenizer, piece, kept = tokenizer_at(job.tokenizer), begun(job), list[Document]()
    filling = np.full(job.length + 1, not_learned(tokenizer.end))
    for split in range(len(SPLITS)):
        with piece.path(split).open("wb") as file:
            for row, tokens in (found for rows in batches(job.spool, split) for found in encode_rows(tokenizer, rows)):
                learned = int((tokens[1:] >= 0).sum())
                if reason := why_no_row(len(tokens), learned, len(filling)):
                    piece.bad.append(BadRow(row["name"], row["line"], "", reason, row["text"]))
                    piece.bad_by_split[split] += 1
                    continue
                file.write(np.append(tokens, filling[len(tokens) :]).astype(job.dtype).data)
                piece.tokens[split] += len(tokens)
                piece.learned[split] += learned
                if row["place"] < job.kept[split]:
                    whole = tokens if split == TEST else tokens[:0]
                    kept.append(Document(row["name"], SPLITS[split], row["answers"], whole))
    write_kept(piece, kept)
    return piece


def encode_rows(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    answers = [LearnedSpans(zip(row["spans"][::2], row["spans"][1::2], strict=True), row["marked"]) for row in rows]
    return zip(rows, tokenizer.conversations([row["text"] for row in rows], answers), strict=True)


def why_no_row(tokens: int, learned: int, room: int) -> str:
    if tokens > room:
        return f"a conversation of {tokens:,} tokens, more than data.length + 1, {room:,}"
    return "" if learned else "no answer: every token of its answers also holds text of another message"


def begun(job: EncodeDocumentsJob) -> EncodedChunk:
    job.directory.mkdir(exist_ok=True)
    return EncodedChunk(job.directory)


def batches(spool: Path, split: int) -> Iterator[list[dict[str, Any]]]:
    table = read_spool(spool)
    rows = table.filter(pc.equal(table["split"], split))
    return (rows.slice(start, AT_ONCE).to_pylist() for start in range(0, len(rows), AT_ONCE))


def write_kept(piece: EncodedChunk, kept: list[Document]) -> None:
    with pa.ipc.new_file(piece.documents, SCHEMA) as file:
        file.write_table(documents_table(kept))
