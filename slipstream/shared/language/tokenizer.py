"""Tokenizers in Hugging Face's format: trained on the data, raw bytes, or the user's own.

A tokenizer is kept as the contents of its files, so that it is read once and stored with artifacts that use it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from slipstream.shared.artifacts.prepared.token_rows import (
    CONFIG,
    FAST,
    LONGEST_JSON,
    MOST_IDS,
    disable_padding_and_truncation,
    not_learned,
    read_files,
)
from slipstream.shared.errors import UserError
from slipstream.shared.language.engine import TokenizerEngine, bytes_bpe, engine_process, trained_bpe
from slipstream.shared.storage import STORES, MissingObject, open_below
from slipstream.shared.storage.local import local_path

#: Contents of a tokenizer's files by file name.
TokenizerFiles: TypeAlias = dict[str, str]
SETTINGS, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
#: Files that are parsed here, all texts.
READ = (FAST, SETTINGS, SPECIAL, TEMPLATE)
#: End token of tokenizers built here, and tokens that start and end a turn of a conversation.
END, TURN, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


class LearnedSpans(NamedTuple):
    """Start and end characters of the learned text of a conversation, and whether the template marked it."""

    spans: Iterable[tuple[int, int]]
    marked: bool


class Tokenizer:
    """Tokenizer loaded from Hugging Face's files.

    ``files`` lack the entries that would make ids depend on earlier use or on chance. ``end`` is the id that ends a
    document, ``front`` the ids that the post-processor puts in front of one, ``vocabulary`` the number of ids;
    ``specials`` are the texts of the special tokens, ``special_ids`` their ids.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        """Raise ``UserError`` for files that are not a tokenizer, name no end token, or have ids out of range."""
        self.files = with_reset(files)
        self._engine = engine_process(self.files[FAST])
        self.end = self.id_of(end_token(files))
        largest = self._engine.call(0, TokenizerEngine.largest_id)
        if largest >= MOST_IDS:
            raise UserError(f"data.tokenizer: {FAST} has the token id {largest:,}; expected ids below {MOST_IDS:,}")
        self.vocabulary = 1 + largest
        self.front = self._engine.call(0, TokenizerEngine.front)
        special = self._engine.call(0, TokenizerEngine.specials)
        self.specials = [token.text for token in special]
        self.special_ids = frozenset({*(token.id for token in special), self.end})

    def id_of(self, token: str) -> int:
        number = self._engine.call(0, TokenizerEngine.id_of, token)
        if number is None:
            raise UserError(f"data.tokenizer: the token {token!r} of {SETTINGS} has no id in {FAST}")
        return number

    def text_of(self, number: int) -> str:
        return self._engine.call(0, TokenizerEngine.text_of, number)

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids (int64) of every text as a document; text that spells a special token is plain text."""
        ids, counts = self._engine.call(sum(map(len, texts)), TokenizerEngine.encode_texts, list(texts))
        return [whole_document(each, len(self.front), self.end) for each in split_by_counts(ids, counts)]

    def conversations(self, texts: Sequence[str], answers: Sequence[LearnedSpans]) -> list[np.ndarray]:
        """Return the tokens (int64) of every rendered conversation, with -1 - id for tokens not in the loss."""
        size = sum(map(len, texts))
        ids, counts, offsets = self._engine.call(size, TokenizerEngine.encode_with_specials, list(texts))
        both = split_by_counts(offsets, [2 * count for count in counts])
        rows = zip(split_by_counts(ids, counts), both, answers, strict=True)
        return [mark_learned_tokens(tokens, places.reshape(-1, 2), learned) for tokens, places, learned in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.call(len(ids), TokenizerEngine.decode, list(ids))


def whole_document(ids: np.ndarray, front: int, end: int) -> np.ndarray:
    """Return the ids (int64) of a document, ``ids`` with ``front``, between end tokens.

    The end token is not repeated at the end, and stands in front only if nothing else does.
    """
    first = [] if front else [end]
    last = [] if len(ids) > front and ids[-1] == end else [end]
    return np.concatenate([first, ids, last]).astype(np.int64)


def split_by_counts(values: array[int], counts: Iterable[int]) -> list[np.ndarray]:
    """Split ``values`` into one array (int64) per text; ``counts`` are their lengths."""
    whole = np.array(values, np.int64)
    return [whole[start:stop] for start, stop in pairwise([0, *accumulate(counts)])]


def mark_learned_tokens(ids: np.ndarray, offsets: np.ndarray, answers: LearnedSpans) -> np.ndarray:
    """Return the ids of learned tokens, and of all others the form ``not_learned``.

    A token that holds the start of an answer and text before it is learned only if the template marked the answer.
    """
    learned = np.zeros(len(ids), bool)
    starts, ends = offsets.T
    for first, last in answers.spans:
        learned |= ((ends > first) if answers.marked else (starts >= first)) & (starts < last)
    return np.where(learned, ids, not_learned(ids))


def with_reset(files: Mapping[str, str]) -> TokenizerFiles:
    """Return the files with truncation, padding and dropout disabled.

    Raises ``UserError`` unless ``tokenizer.json`` is a JSON object.
    """
    try:
        return {**files, FAST: disable_padding_and_truncation(files[FAST])}
    except ValueError as error:
        raise UserError(f"data.tokenizer: {FAST} is not a tokenizer of Hugging Face's tokenizers: {error}") from None


def read_tokenizer(address: str) -> TokenizerFiles:
    """Return the tokenizer in a local directory or a store; raises ``UserError`` if there is none."""
    if not address.startswith(STORES) and not local_path(address).is_dir():
        raise UserError(
            f"data.tokenizer: {address!r} is not a directory; expected train, bytes, or a directory with {FAST}"
        )
    try:
        return texts_of(read_files(address), address)
    except UserError as error:
        raise UserError(f"data.tokenizer: {error.message}") from None


def vocabulary_beside(address: str) -> int:
    """Return the vocabulary size in the ``config.json`` next to a tokenizer, or 0 without one.

    It may exceed the tokenizer's vocabulary. ``address`` may be in a store. Raises ``UserError`` for invalid JSON or an
    invalid size.
    """
    where = f"{address.rstrip('/')}/{CONFIG}"
    try:
        with open_below(address, CONFIG) as file:
            text = file.read(LONGEST_JSON + 1)
        if len(text) > LONGEST_JSON:
            raise ValueError(f"it has more than {LONGEST_JSON} bytes")
        content = json.loads(text)
    except MissingObject:
        return 0
    except UserError as error:
        raise UserError(f"data.tokenizer: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {where} cannot be read as JSON: {error}") from None
    stated = content.get("vocab_size") if isinstance(content, dict) else None
    if stated is not None and not (type(stated) is int and 0 <= stated <= MOST_IDS):
        raise UserError(
            f"data.tokenizer: {where}: vocab_size: {stated!r:.40} is not allowed; expected an integer from 0 to "
            f"{MOST_IDS:,}"
        )
    return stated or 0


def texts_of(contents: Mapping[str, bytes], address: str) -> TokenizerFiles:
    files = {}
    for name, content in contents.items():
        try:
            files[name] = content.decode()
        except UnicodeDecodeError:
            continue  # tokenizer.model, which is not read here.
    if FAST not in files:
        raise UserError(f"{address} holds no {FAST}; expected one, as Hugging Face's libraries write it")
    return files


def end_token(files: Mapping[str, str]) -> str:
    """Return the text of the end token; raises ``UserError`` if none is named."""
    for name in (SETTINGS, SPECIAL):
        token = tokenizer_json_entry(files, name, "eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    raise UserError(f"data.tokenizer: names no end token; expected eos_token in {SETTINGS}")


def tokenizer_json_entry(files: Mapping[str, str], name: str, key: str) -> object:
    """Return ``key`` in a JSON file of the tokenizer, or None; raises ``UserError`` unless it is a JSON object."""
    if name not in files:
        return None
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {name} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"data.tokenizer: {name} is not a JSON object")
    return content.get(key)


def bytes_tokenizer(*, turns: bool) -> TokenizerFiles:
    """Return a tokenizer with one id per byte, then special tokens; ``turns`` adds those for turns."""
    return made(bytes_bpe(special_texts(turns=turns)))


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, turns: bool) -> TokenizerFiles:
    """Train byte-level BPE with at most ``vocabulary`` ids; little text gives fewer.

    Sennrich, Haddow and Birch 2016; Radford et al. 2019, "GPT-2". The same texts give the same files on any number of
    threads.
    """
    return made(trained_bpe(texts, vocabulary, special_texts(turns=turns)))


def special_texts(*, turns: bool) -> list[str]:
    return [END, TURN, TURN_ENDS] if turns else [END]


def made(fast: str) -> TokenizerFiles:
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    return {FAST: fast, SETTINGS: json.dumps(settings, indent=2)}
