"""Preparation of language: read and split, train the tokenizer on the training split, encode, pack into rows.

Splits, order and bytes depend only on data and settings, not on the number of workers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from slipstream.pipeline.prepare.card import row_counts as counted
from slipstream.pipeline.prepare.card import with_skipped
from slipstream.pipeline.prepare.fit.fit import check_splits
from slipstream.pipeline.prepare.fit.splits import TEST, TRAIN, SplitOverlap
from slipstream.pipeline.prepare.language.corpus import TOOLS, CorpusChunk, CorpusRecord, corpus_chunks, read_piece
from slipstream.pipeline.prepare.language.encode import (
    EncodedChunk,
    EncodeDocumentsJob,
    encode_conversations,
    encode_documents,
    has_own_start,
)
from slipstream.pipeline.prepare.language.read import ReadChunk, ReadJob, first_lines, read, read_spool, shift_lines
from slipstream.pipeline.prepare.progress import with_progress
from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.pipeline.prepare.shuffle import RunWriter, SortedRun, enter_segments, merge_all, order_keys
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.card import BEHIND_THE_END, CARD, AnswersCard, ColumnCard, DataCard
from slipstream.shared.artifacts.prepared.data import ROW_FORMAT, SPLITS, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.documents import write_documents
from slipstream.shared.artifacts.prepared.token_rows import TOKENIZER
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.language.chat_template import OWN_TEMPLATE, load_chat_template
from slipstream.shared.language.template_process import TemplateStopped
from slipstream.shared.language.tokenizer import (
    TEMPLATE,
    Tokenizer,
    TokenizerFiles,
    bytes_tokenizer,
    special_texts,
    train_tokenizer,
)
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.given_splits import (
    folder_name,
    in_words,
    refuse_column,
    report_drawn,
    splits_of_files,
)
from slipstream.shared.source.quarantine import BadRow

#: Largest number of bytes of training text for training a tokenizer, of training text stored for the baseline, and of
#: held-out text stored for measuring models.
LEARNED_BYTES, KEPT_BYTES, MEASURED_BYTES = 256 << 20, 16 << 20, 4 << 20
#: Largest vocabulary for which int16 holds both id and -1 - id.
MOST_NARROW = 1 << 15


@dataclass(frozen=True)
class Corpus:
    """Documents (or conversations) after the first pass; ``dropped`` counts those quarantined later, by split."""

    units: list[ReadChunk]
    bad: list[BadRow]
    conversations: bool
    #: Number of lines before every unit within its file.
    before: list[int]
    dropped: list[int]
    #: Given splits that are drawn from the training rows.
    drawn: list[int] = field(default_factory=list)

    @property
    def documents(self) -> list[int]:
        return (np.sum([unit.documents for unit in self.units], axis=0) - self.dropped).tolist()

    def without(self, encoded: list[EncodedChunk]) -> Corpus:
        """Return the corpus without the conversations that were quarantined during encoding."""
        dropped = np.sum([piece.bad_by_split for piece in encoded], axis=0).tolist()
        found = zip(encoded, self.before, strict=True)
        bad = [row for piece, lines in found for row in shift_lines(piece.bad, lines)]
        return replace(self, bad=self.bad + bad, dropped=dropped)

    def check(self, config: DataConfig) -> None:
        """Raise ``UserError`` if more than ``data.quarantine_limit`` is unusable or a split is empty."""
        quarantine.check_limit(self.bad, sum(self.documents) + len(self.bad), config.quarantine_limit)
        check_splits(self.documents)

    @property
    def bytes(self) -> list[int]:
        return np.sum([unit.bytes for unit in self.units], axis=0).tolist()

    @property
    def copies(self) -> int:
        hashes = np.concatenate([unit.hashes for unit in self.units])
        return len(hashes) - len(np.unique(hashes))


def prepare_language(writer: ArtifactWriter, scratch: ResumableScratch, source: SourceToPrepare) -> None:
    """Write the prepared data of text; raise ``UserError`` for text that cannot be learned."""
    config = source.config
    corpus = read_corpus(source, scratch)
    tokenizer = Tokenizer(tokenizer_of(source, corpus))
    encoded = list(encode_corpus(scratch, corpus, tokenizer, config))
    corpus = corpus.without(encoded)
    corpus.check(config)
    learned, own_start = sum(piece.learned[TRAIN] for piece in encoded), False
    if corpus.conversations:
        mean = learned / corpus.documents[TRAIN]
    else:
        check_rows(row_counts(encoded, config.length), encoded, config)
        own_start = has_own_start(tokenizer)
        mean = config.length * learned / sum(piece.tokens[TRAIN] for piece in encoded) if own_start else 0.0
    signature = Signature(
        inputs=(TensorSpec("tokens", dtype_of(tokenizer), (config.length,)),),
        task="next token",
        target="next token",
        # A model may have more ids than its tokenizer, rounded up to a multiple.
        buckets=max(tokenizer.vocabulary, source.vocabulary),
        # A conversation has its own row, and may have the end token after every turn.
        document_end=-1 if config.across_documents or corpus.conversations else tokenizer.end,
        document_front=tokenizer.front[0] if own_start else -1,
        learned=mean,
        row_format=ROW_FORMAT,
    )
    end = None if corpus.conversations else tokenizer.end
    runs = pack_rows(scratch.root / "packed", encoded, signature, end, shuffle=config.shuffle)
    enter_segments(writer, merge_all(scratch, runs, signature.record.itemsize), number=0)
    quarantine.write_quarantine(writer, corpus.bad)
    write_documents(writer, [read_whole_table(piece.documents) for piece in encoded])
    for name, content in tokenizer.files.items():
        writer.write_bytes(f"{TOKENIZER}/{name}", content.encode())
    write_record(writer, "signature.json", signature)
    writer.write_json("statistics.json", {"columns": {}})
    writer.write_json("schema.json", {"columns": [{"name": "text", "type": "text", "role": "document"}]})
    writer.write_json(CARD, with_skipped(card_of(source, corpus, encoded, signature), source.listing).to_json())


def read_corpus(source: SourceToPrepare, scratch: ResumableScratch) -> Corpus:
    """Read and split the corpus.

    Raise ``UserError`` if more than ``data.quarantine_limit`` of the documents are unusable or a split is empty.
    """
    pieces = corpus_chunks(source)
    conversations = pieces[0].shape != "text"
    template = source.tokenizer or (with_template(bytes_tokenizer(turns=True)) if conversations else {})
    if conversations:
        load_chat_template(template, source.config.date)  # before any row is read
    config = source.config
    drawn = report_drawn(given_names(source, pieces), config) if config.split.is_given else []
    jobs = (
        ReadJob(
            piece,
            source.config,
            scratch.root / f"text-{number:06d}.arrow",
            template,
            given_by_file(source, piece.files),
            drawn,
        )
        for number, piece in enumerate(pieces)
    )
    units = list[ReadChunk]()
    try:
        for unit in with_progress("read", scratch.map(read, jobs), [len(piece.files) for piece in pieces]):
            units.append(unit)
    except TemplateStopped as error:
        line = error.line + first_lines(pieces[: len(units) + 1], units)[-1]
        raise TemplateStopped(error.reason, error.tokenizer, error.file, line) from None
    before = first_lines(pieces, units)
    bad = [row for unit, lines in zip(units, before, strict=True) for row in shift_lines(unit.bad, lines)]
    corpus = Corpus(units, bad, conversations, before, [0] * len(SPLITS), drawn)
    corpus.check(source.config)
    return corpus


def given_names(source: SourceToPrepare, pieces: Sequence[CorpusChunk]) -> set[str | None]:
    """Return the names of given splits: folders, or all values of the column; empty without given splits."""
    config, column = source.config, source.config.split.column
    if config.split.directories:
        return {folder_name(source.listing, file) for file in source.files}
    if column and pieces[0].format == "text":
        refuse_column(config)
    records = (record for piece in pieces if column for record in read_piece(piece, config.encoding, column))
    return {str(each.values.get(column) or "") for each in records if isinstance(each, CorpusRecord)}


def given_by_file(source: SourceToPrepare, files: Sequence[SourceFile]) -> dict[str, int]:
    if not source.config.split.directories:
        return {}
    return {file.uri: int(n) for file, n in zip(files, splits_of_files(source.listing, files), strict=True)}


def with_template(files: TokenizerFiles) -> TokenizerFiles:
    return {**files, TEMPLATE: OWN_TEMPLATE}


def tokenizer_of(source: SourceToPrepare, corpus: Corpus) -> TokenizerFiles:
    if source.tokenizer:
        return source.tokenizer
    turns = corpus.conversations
    if source.config.tokenizer == "bytes":
        files = bytes_tokenizer(turns=turns)
    else:
        files = train_tokenizer(training_texts(corpus), source.config.vocabulary, turns=turns)
    return with_template(files) if turns else files


def training_texts(corpus: Corpus) -> Iterator[str]:
    """Yield the texts of the training split, or a uniform sample of about ``LEARNED_BYTES`` if it is larger."""
    share = share_of(LEARNED_BYTES, corpus.bytes[TRAIN])
    turns = re.compile("|".join(map(re.escape, special_texts(turns=True))))
    for unit in corpus.units:
        for row in read_spool(unit.path).select(["split", "place", "text"]).to_pylist():
            if row["split"] == TRAIN and row["place"] < share:
                # Special tokens are removed from conversations: they are not learned as text.
                yield from turns.split(row["text"]) if corpus.conversations else (row["text"],)


def share_of(most: int, there: int) -> float:
    return min(1.0, most / max(1, there))


def encode_corpus(
    scratch: ResumableScratch, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig
) -> Iterator[EncodedChunk]:
    content = json.dumps(tokenizer.files).encode()
    # Named by content, because workers cache the tokenizer by path.
    path = scratch.root / f"tokenizer-{xxhash.xxh3_128_hexdigest(content)}.json"
    path.write_bytes(content)
    kept = [0.0] * len(SPLITS)
    kept[TRAIN] = share_of(KEPT_BYTES, corpus.bytes[TRAIN])
    kept[TEST] = share_of(MEASURED_BYTES, corpus.bytes[TEST])
    jobs = (
        EncodeDocumentsJob(
            unit.path, path, dtype_of(tokenizer), config.length, kept, scratch.root / f"tokens-{number:06d}"
        )
        for number, unit in enumerate(corpus.units)
    )
    encode = encode_conversations if corpus.conversations else encode_documents
    return with_progress("encode", scratch.map(encode, jobs), [sum(unit.documents) for unit in corpus.units])


def dtype_of(tokenizer: Tokenizer) -> str:
    """Return the narrowest dtype that holds both id and -1 - id for every token."""
    return "int16" if tokenizer.vocabulary <= MOST_NARROW else "int32"


def check_rows(counts: list[int], encoded: list[EncodedChunk], config: DataConfig) -> None:
    """Raise ``UserError`` for a split whose documents do not fill one row."""
    for split, rows in enumerate(counts):
        if not rows:
            tokens = sum(piece.tokens[split] for piece in encoded)
            raise UserError(
                f"data.length: the documents of the {SPLITS[split]} split have {tokens:,} tokens, fewer than a row of "
                f"{config.length:,}; expected more text, a smaller length or a larger share in data.split"
            )


def read_whole_table(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def card_of(source: SourceToPrepare, corpus: Corpus, encoded: list[EncodedChunk], signature: Signature) -> DataCard:
    read = sum(corpus.documents) + len(corpus.bad)
    tokens = np.sum([piece.tokens for piece in encoded], axis=0).tolist()
    what = "conversations" if corpus.conversations else "documents"
    notes = [f"{corpus.copies:,} {what} are copies of others; copies share a split"] if corpus.copies else []
    if source.config.split.is_given:
        splits, hashes = [unit.splits for unit in corpus.units], [unit.hashes for unit in corpus.units]
        notes = SplitOverlap(splits, hashes, times=[np.empty((0, 0))]).warnings()
        notes += in_words(corpus.drawn, source.config)
    if any(unit.asked_for_date for unit in corpus.units):
        notes.append(f"the chat template asked for the date and was given {source.config.date} (data.date)")
    if source.tokenizer and not corpus.conversations and not Tokenizer(source.tokenizer).front:
        notes.append(BEHIND_THE_END)
    answers = total_answers([unit.answers for unit in corpus.units if unit.answers])
    notes += left_out_notes(answers)
    return DataCard(
        source=source.name,
        rows=counted(read, corpus.documents, len(corpus.bad)),
        task=signature.task,
        target=signature.target,
        columns=[ColumnCard("text", "text", "document", missing=0)],
        classes={},
        warnings=notes,
        tokens=dict(zip(SPLITS, tokens, strict=True)),
        bytes=dict(zip(SPLITS, corpus.bytes, strict=True)),
        answers=answers,
    )


def total_answers(cards: Sequence[AnswersCard]) -> AnswersCard | None:
    if not cards:
        return None
    rows, left_out = Counter[str](), Counter[str]()
    for card in cards:
        rows.update(card.rows)
        left_out.update(card.left_out)
    learned, others = sum(card.learned for card in cards), sum(card.not_learned for card in cards)
    return AnswersCard(dict(rows), learned, others, dict(sorted(left_out.items())))


def left_out_notes(answers: AnswersCard | None) -> Iterator[str]:
    for name, count in answers.left_out.items() if answers else ():
        role, _, key = name.partition(".")
        of = f"{key!r} of " if key else ""
        messages = f"{of}{count:,} {'message' if count == 1 else 'messages'} with the role {role!r}"
        what = f"the tools of {count:,} {'row' if count == 1 else 'rows'}" if role == TOOLS else messages
        yield f"the chat template leaves out {what}"


# A row has one token more than the model's input and starts with the last token of the row before. So every token of a
# split is a target once, except those of an incomplete last row. Conversations already are rows.
#: Number of tokens of a chunk read at once.
AT_ONCE = 4 << 20


def row_counts(pieces: list[EncodedChunk], length: int) -> list[int]:
    """Return the number of full rows in every split; an end token is added before the first document."""
    return [sum(piece.tokens[split] for piece in pieces) // length for split in range(len(SPLITS))]


def pack_rows(
    path: Path, pieces: list[EncodedChunk], signature: Signature, end: int | None, *, shuffle: bool
) -> list[SortedRun]:
    """Write the rows of all splits as sorted runs ``path``; if ``end`` is None, the rows are conversations."""
    (length,), token = signature.inputs[0].shape, np.dtype(signature.inputs[0].dtype)
    width = 1 if end is not None else length + 1
    total = sum(row_counts(pieces, length)) if end is not None else stored_rows(pieces, width * token.itemsize)
    first = 0
    with RunWriter(path) as writer:
        for split in range(len(SPLITS)):
            parts = tokens_of([piece.path(split) for piece in pieces], token, width)
            rows_of = (
                pack_tokens(parts, length, end, token) if end is not None else (p.reshape(-1, width) for p in parts)
            )
            for rows in rows_of:
                order = order_keys(first, len(rows), total, shuffle)
                records = rows.view(signature.record).reshape(len(rows))
                writer.add(split, np.arange(len(rows)), order, records)
                first += len(rows)
    return writer.runs


def stored_rows(pieces: list[EncodedChunk], size: int) -> int:
    return sum(piece.path(split).stat().st_size for piece in pieces for split in range(len(SPLITS))) // size


def tokens_of(paths: Iterable[Path], token: np.dtype, width: int) -> Iterator[np.ndarray]:
    """Yield the tokens of some files in arrays whose lengths are multiples of ``width``."""
    for path in paths:
        with path.open("rb") as file:
            while len(part := np.fromfile(file, token, max(1, AT_ONCE // width) * width)):
                yield part


def pack_tokens(parts: Iterable[np.ndarray], length: int, end: int, token: np.dtype) -> Iterator[np.ndarray]:
    """Yield ``end`` and the tokens of ``parts`` as rows ``[rows, length + 1]``; drop an incomplete last row."""
    carried = np.array([end], token)
    for part in parts:
        tokens = np.concatenate([carried, part])
        rows = (len(tokens) - 1) // length
        if rows:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length][:rows]
            yield np.ascontiguousarray(windows)
        carried = tokens[rows * length :]
