"""First pass over a corpus: every chunk becomes a spool, an Arrow file of documents with their splits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pyarrow as pa
import xxhash

from slipstream.pipeline.prepare.fit.splits import assign_splits, draw_missing
from slipstream.pipeline.prepare.language.corpus import CorpusChunk, CorpusRecord, Shape, read_piece
from slipstream.shared.artifacts.prepared.card import AnswersCard
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.language.chat_template import (
    CannotRender,
    ChatTemplate,
    Conversation,
    RenderedConversation,
    load_chat_template,
    row_conversation,
)
from slipstream.shared.language.template_process import TemplateStopped
from slipstream.shared.language.template_worker import MARKED, Rule
from slipstream.shared.language.tokenizer import Tokenizer
from slipstream.shared.source.columns.identity import splitmix64
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.given_splits import split_number
from slipstream.shared.source.quarantine import BadRow

#: Seed for choosing the documents that are stored unchanged; differs from the seed of the splits.
SAMPLE_SEED = np.uint64(0x5EED)
#: Number of conversations, and of their characters, that the template renders at once.
AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 18
SPOOL = pa.schema(
    [
        ("name", pa.string()),
        ("line", pa.int64()),
        ("split", pa.uint8()),
        ("place", pa.float64()),
        ("text", pa.large_string()),
        # For rendered conversations: start and end of all learned text, this text, and whether the template marked it.
        ("spans", pa.list_(pa.int64())),
        ("answers", pa.list_(pa.large_string())),
        ("marked", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class ReadJob:
    """Job of one worker: read a chunk; ``tokenizer`` holds the tokenizer's files, with the chat template."""

    piece: CorpusChunk
    config: DataConfig
    path: Path
    tokenizer: dict[str, str] = field(default_factory=dict)
    #: Split of every file by URI, if its folder names it; given splits of ``drawn`` are drawn.
    given: dict[str, int] = field(default_factory=dict)
    drawn: Sequence[int] = ()


class ReadText(NamedTuple):
    """Document, or rendered conversation in which only the ``answers`` have loss.

    ``content`` is the unrendered input. It decides the split, so that the template does not affect splits. ``number``
    counts the rows of one input.
    """

    record: CorpusRecord
    content: str
    text: str
    answers: list[str]
    number: int = 0
    rendered: RenderedConversation | None = None
    not_learned: int = 0

    @property
    def spans(self) -> list[int]:
        return [place for span in self.rendered.spans for place in span] if self.rendered else []


class ConversationRow(NamedTuple):
    """Row to render, as in :class:`ReadText`; ``complete`` is the conversation of the input."""

    record: CorpusRecord
    complete: Conversation
    number: int
    conversation: Conversation


@dataclass(frozen=True)
class ReadChunk:
    """Result of reading a chunk: a spool, with numbers of ``documents`` and ``bytes`` by split.

    ``lines`` is the number of lines of a JSON Lines chunk, to locate those of later chunks. ``hashes`` (uint64) are of
    the documents' contents.
    """

    path: Path
    file: str
    lines: int
    documents: list[int]
    bytes: list[int]
    hashes: np.ndarray
    splits: np.ndarray
    bad: list[BadRow] = field(default_factory=list)
    #: Whether the chat template used the date.
    asked_for_date: bool = False
    #: Counts for the card's ``answers``.
    answers: AnswersCard | None = None

    @property
    def files(self) -> list[Path]:
        return [self.path]


def read(job: ReadJob) -> ReadChunk:
    """Read, hash and split a chunk; runs in a worker process.

    Raise ``TemplateStopped`` for a conversation for which the chat template exceeds a limit.
    """
    bad: list[BadRow] = []
    lines = 0

    def records() -> Iterator[CorpusRecord]:
        nonlocal lines
        for found in read_piece(job.piece, job.config.encoding, job.config.split.column):
            lines = found.line
            if isinstance(found, BadRow):
                bad.append(found)
            elif isinstance(found, CorpusRecord):
                yield found

    if job.piece.shape == "text":
        texts = list(read_documents(records(), bad))
    else:
        texts = list(read_conversations(job, records(), bad))
        bad.sort(key=lambda row: row.line)  # rendered rows come in batches
    hashes = hashes_of((each.content, 0) for each in texts)
    if job.config.split.is_given:
        given = np.array([given_split(each.record, job) for each in texts], np.uint8)
        splits = draw_missing(given, hashes, job.drawn, job.config.split)
    else:
        splits = assign_splits(hashes, job.config.split)
    sizes = np.array([len(each.text.encode()) for each in texts], np.int64)
    columns = {
        "name": [each.record.file for each in texts],
        "line": [each.record.line for each in texts],
        "split": splits,
        "place": (splitmix64(hashes ^ SAMPLE_SEED) >> np.uint64(11)) * 2.0**-53,
        "text": [each.text for each in texts],
        "spans": [each.spans for each in texts],
        "answers": [each.answers for each in texts],
        "marked": [each.rendered is not None and each.rendered.rule == MARKED for each in texts],
    }
    with pa.ipc.new_file(job.path, SPOOL) as spool:
        spool.write_table(pa.Table.from_pydict(columns, SPOOL))
    return ReadChunk(
        path=job.path,
        file=job.piece.files[0].uri,
        lines=lines,
        documents=np.bincount(splits, minlength=len(SPLITS)).tolist(),
        bytes=[int(sizes[splits == split].sum()) for split in range(len(SPLITS))],
        hashes=hashes_of((each.content, each.number) for each in texts),
        splits=splits,
        bad=bad,
        asked_for_date=any(each.rendered.asked_for_date for each in texts if each.rendered),
        answers=None if job.piece.shape == "text" else answers_card(texts),
    )


def given_split(record: CorpusRecord, job: ReadJob) -> int:
    column = job.config.split.column
    return split_number(str(record.values.get(column))) if column else job.given[record.file]


def hashes_of(contents: Iterable[tuple[str, int]]) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(text.encode(), seed) for text, seed in contents], np.uint64)


def answers_card(texts: Sequence[ReadText]) -> AnswersCard:
    rendered = [each.rendered for each in texts if each.rendered]
    rules = Counter(each.rule for each in rendered)
    left_out = Counter(".".join(filter(None, name)) for each in rendered for name in each.unused)
    return AnswersCard(
        rows={rule: rules[rule] for rule in get_args(Rule)},
        learned=sum(len(each.learned) for each in rendered),
        not_learned=sum(each.not_learned for each in texts),
        left_out=dict(sorted(left_out.items())),
    )


def read_documents(records: Iterable[CorpusRecord], bad: list[BadRow]) -> Iterator[ReadText]:
    """Yield the documents; add the rows without one to ``bad``."""
    for record in records:
        try:
            text = document(record.values.get("text"))
        except CannotRender as error:
            bad.append(bad_row(record, "text", error))
        else:
            yield ReadText(record, text, text, [])


def document(text: object) -> str:
    """Return a text that can be learned; raise :class:`CannotRender` for anything else."""
    if not isinstance(text, str):
        raise CannotRender("not text")
    try:
        text.encode()
    except UnicodeError:
        raise CannotRender("half of a surrogate pair, which is not valid text") from None
    if not text:
        raise CannotRender("the text is empty")
    return text


def read_conversations(job: ReadJob, records: Iterable[CorpusRecord], bad: list[BadRow]) -> Iterator[ReadText]:
    """Yield the rendered conversations; add other rows to ``bad``."""
    template = load_chat_template(job.tokenizer, job.config.date)
    specials = [token for token in Tokenizer(job.tokenizer).specials if token]
    removed = re.compile("|".join(map(re.escape, specials)) or "(?!)")
    batch: list[ConversationRow] = []
    characters = 0
    for record in records:
        try:
            complete = conversation(record, specials)
        except CannotRender as error:
            bad.append(bad_row(record, job.piece.shape, error))
            continue
        for number, row in enumerate(complete.rows(each=job.config.answers == "each")):
            batch.append(ConversationRow(record, complete, number, row))
            characters += sum(map(len, row.texts))
            if len(batch) >= AT_ONCE or characters >= CHARACTERS_AT_ONCE:
                yield from render_batch(job, template, batch, removed, bad)
                batch, characters = [], 0
    yield from render_batch(job, template, batch, removed, bad)


def conversation(record: CorpusRecord, specials: Sequence[str]) -> Conversation:
    """Return the conversation of a row.

    Raise :class:`CannotRender` if there is none, or if a message contains a special token, which could end the turn.
    """
    found = row_conversation(record.values)
    for text in found.texts:
        document(text or " ")
        if spelled := next((special for special in specials if special in text), None):
            raise CannotRender(f"a message spells the special token {spelled!r}")
    return found


def render_batch(
    job: ReadJob,
    template: ChatTemplate,
    batch: Sequence[ConversationRow],
    removed: re.Pattern[str],
    bad: list[BadRow],
) -> Iterator[ReadText]:
    """Yield the rendered texts of a batch, their answers without ``removed``.

    Raise ``TemplateStopped`` with file and line.
    """
    found = template.render([each.conversation for each in batch])
    for record, complete, number, _ in batch:
        try:
            one = next(found)
        except TemplateStopped as error:
            raise TemplateStopped(error.reason, job.config.tokenizer, record.file, record.line) from None
        if isinstance(one, CannotRender):
            bad.append(bad_row(record, job.piece.shape, one))
        else:
            answers = [removed.sub("", text) for text in one.texts]
            if job.config.answers == "each":
                not_learned = 0 if number else complete.number_of_answers - len(complete.answers)
            else:
                not_learned = complete.number_of_answers - len(one.learned)
            yield ReadText(record, complete.content, one.text, answers, number, one, not_learned)


def bad_row(record: CorpusRecord, shape: Shape, error: CannotRender) -> BadRow:
    return BadRow(record.file, record.line, shape, str(error), repr(record.values.get(shape)))


def read_spool(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def first_lines(pieces: Sequence[CorpusChunk], units: Sequence[ReadChunk]) -> list[int]:
    """Return the number of lines before every chunk within its JSON Lines file; 0 for other formats.

    ``units`` may lack the last chunk.
    """
    before, of_file = [], dict[str, int]()
    for piece, unit in zip_longest(pieces, units):
        file = piece.files[0].uri
        before.append(of_file.get(file, 0) if piece.format == "json" else 0)
        of_file[file] = of_file.get(file, 0) + (unit.lines if unit else 0)
    return before


def shift_lines(bad: list[BadRow], lines: int) -> Iterator[BadRow]:
    """Return bad rows with ``lines`` added to their line numbers."""
    return (replace(row, line=row.line + lines) for row in bad)
