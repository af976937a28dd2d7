"""Prepared data of token rows of fixed length, for models that predict every next token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.shared.artifacts.format import BLOCK_BYTES, ArtifactWriter
from slipstream.shared.artifacts.prepared.card import CARD, DataCard
from slipstream.shared.artifacts.prepared.data import KIND, ROW_FORMAT, SPLITS, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.errors import UserError
from slipstream.shared.storage import STORES, MissingObject, list_names, read_below

T = TypeVar("T", int, np.ndarray)
#: The file's name, as Hugging Face's libraries write it.
FAST = "tokenizer.json"
#: Largest vocabulary of a tokenizer; models allocate an embedding per id.
MOST_IDS = 1 << 24
#: Entries that change encoding because of earlier use of the tokenizer, with values that disable them.
STATE = {"truncation": None, "padding": None}
#: Entry of the tokenizer's model that makes encoding random, with the value that disables it.
RANDOM = {"dropout": None}


def parse_tokenizer_json(text: str) -> dict[str, Any]:
    """Parse a ``tokenizer.json``. Raises ``ValueError`` if it is not a JSON object."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def disable_padding_and_truncation(text: str) -> str:
    """Return a ``tokenizer.json`` with truncation, padding and dropout disabled; unchanged if none was set.

    The library would otherwise cut or pad documents and encode them at random. Raises ``ValueError`` if ``text`` is not
    a JSON object.
    """
    content = parse_tokenizer_json(text)
    model = content.get("model")
    parts = [(content, STATE), (model, RANDOM)] if isinstance(model, dict) else [(content, STATE)]
    if not any(part.get(name) != value for part, entries in parts for name, value in entries.items()):
        return text
    for part, entries in parts:
        part |= {name: value for name, value in entries.items() if name in part}
    return json.dumps(content, ensure_ascii=False)


def largest_id(text: str) -> int:
    """Return the largest token id of a ``tokenizer.json``, or -1 if it has none. Raises ``ValueError`` if malformed."""
    content = parse_tokenizer_json(text)
    try:
        stored = content["model"]["vocab"]  # ids by token, or a list whose indices are the ids
        ids = [*(stored.values() if isinstance(stored, dict) else range(len(stored)))]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r}") from None
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("its ids are not integers of at least 0")
    return max(ids, default=-1)


#: Files of a tokenizer in a Hugging Face model directory. Any of ``VOCABULARIES`` makes a tokenizer; ``OTHERS`` are
#: optional additions.
VOCABULARIES = (FAST, "tokenizer.model", "vocab.json", "vocab.txt")
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
FILES = (*VOCABULARIES, *OTHERS)
#: Largest size of a tokenizer file in bytes, about twice that of the largest known vocabularies.
LONGEST_FILE = 64 << 20


def read_files(address: str) -> dict[str, bytes]:
    """Return the contents by name of the tokenizer's files at ``address``, an untrusted local or remote directory.

    Raises ``UserError`` for a file that is not regular, exceeds ``LONGEST_FILE`` bytes, or is a symbolic link out of
    the directory; ``StorageUnavailable`` if the store does not answer.
    """
    there = list_names(address) if address.startswith(STORES) else FILES
    found = {}
    for name in FILES:
        with suppress(MissingObject):
            if name in there:
                found[name] = read_below(address, name, LONGEST_FILE)
    return found


def tokenizer_files(directory: Path, vocabulary: int) -> dict[str, bytes]:
    """Return the files of the tokenizer in ``directory`` by name, with truncation, padding and dropout disabled.

    Raises the errors of :func:`read_files`, and ``UserError`` if there is no tokenizer or its ``tokenizer.json`` has
    ids of ``vocabulary`` or more.
    """
    files = read_files(str(directory))
    if files.keys().isdisjoint(VOCABULARIES):
        raise UserError(f"{directory}: holds no tokenizer; expected one of {', '.join(VOCABULARIES)} in it")
    if FAST in files:
        where = directory / FAST
        try:
            text = disable_padding_and_truncation(files[FAST].decode())
            largest = largest_id(text)
            files[FAST] = text.encode()
        except ValueError as error:
            raise UserError(f"{where}: not a tokenizer of Hugging Face's tokenizers: {error}") from None
        if largest >= vocabulary:
            raise UserError(f"{where}: has the token id {largest}; expected ids of the model, 0 to {vocabulary - 1}")
    return files


#: Label of a token that is not learned: the index that torch's losses ignore.
NOT_LEARNED = -100


def not_learned(ids: T) -> T:
    """Return ids in the stored form of tokens that are not learned: -1 - id."""
    return -1 - ids


def read_tokens(stored: Any) -> tuple[Any, Any]:
    """Return ids and labels, int64, of stored tokens: an array of NumPy or a tensor of torch.

    The label of a token that is not learned is :data:`NOT_LEARNED`.
    """
    wide = stored.astype(np.int64) if isinstance(stored, np.ndarray) else stored.long()
    sign = wide >> 63  # -1 for tokens that are not learned, else 0
    ids = wide ^ sign
    return ids, ids + sign * (ids - NOT_LEARNED)


#: Directory of the tokenizer in the prepared data.
TOKENIZER = "tokenizer"


def write_token_rows(
    directory: Path,
    splits: Mapping[str, np.ndarray],
    vocabulary: int,
    seed: int = 0,
    tokenizer: Path | None = None,
    *,
    document_end: int = -1,
) -> PreparedData:
    """Write prepared data of token rows into ``directory``, every split shuffled by ``seed``.

    ``splits`` maps "train", "validation" and optionally "test" to integers ``[rows, length + 1]``: a model gets the
    first ``length`` tokens of a row and predicts the last ``length``. All ids are below ``vocabulary``. The files of
    the directory ``tokenizer`` are stored with the rows and exported with a model. ``document_end`` is that of
    :class:`.Signature`. Raises ``UserError`` for other
    shapes or dtypes, ids out of range, and a missing tokenizer.
    """
    more = tokenizer_files(tokenizer, vocabulary) if tokenizer else {}
    widths = {name: rows.shape[1:] for name, rows in splits.items()}
    if unknown := sorted(set(splits) - set(SPLITS)):
        raise UserError(f"{unknown[0]!r} is not a split; expected {', '.join(SPLITS)}")
    if len(set(widths.values())) != 1 or any(len(width) != 1 or width[0] < 2 for width in widths.values()):
        raise UserError(f"the splits have rows of {widths}; expected one length of at least 2 tokens for all")
    for name, rows in splits.items():
        if rows.dtype.kind not in "iu":
            raise UserError(f"the {name} split holds {rows.dtype}; expected integers")
        if rows.size and not (rows.min() >= 0 and rows.max() < vocabulary):
            range_of_ids = f"ids from {rows.min()} to {rows.max()}"
            raise UserError(f"the {name} split has {range_of_ids}; expected 0 to {vocabulary - 1}")
    length = next(iter(widths.values()))[0] - 1
    tokens = TensorSpec("tokens", "int64", (length,))
    signature = Signature(
        (tokens,), "next token", "next token", buckets=vocabulary, document_end=document_end, row_format=ROW_FORMAT
    )
    record = signature.record.itemsize
    writer = ArtifactWriter(directory)
    for name in SPLITS:
        stored = splits.get(name, np.empty((0, length + 1))).astype("<i8")
        block = max(1, BLOCK_BYTES // record) * record
        with writer.create(f"{name}-00000.rows", block_bytes=block) as file:
            file.write(np.random.default_rng(seed).permutation(stored).view(np.uint8).reshape(-1))
    for name, content in more.items():
        writer.write_bytes(f"{TOKENIZER}/{name}", content)
    counts = {name: len(splits.get(name, ())) for name in SPLITS}
    write_record(writer, "signature.json", signature)
    writer.write_json("schema.json", {"columns": []})
    writer.write_json("statistics.json", {"columns": {}})
    read = {"read": sum(counts.values()), "kept": sum(counts.values()), "quarantined": 0, **counts}
    writer.write_json(CARD, DataCard("", read, signature.task, signature.target, columns=[], classes={}).to_json())
    writer.finish(KIND, {"vocabulary": vocabulary, "seed": seed})
    return PreparedData.open(directory)


CONFIG = "config.json"
#: File with all weights, or the index that maps tensors to several files.
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files of peft's adapters.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
#: Largest JSON file of a model that is read, in bytes; larger files are refused.
LONGEST_JSON = 64 << 20
