"""Prepared data of token rows of fixed length, for models that predict every next token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from slipstream.shared.artifacts.format import BLOCK_BYTES, ArtifactWriter
from slipstream.shared.artifacts.prepared.card import CARD, DataCard
from slipstream.shared.artifacts.prepared.data import KIND, SPLITS, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.tokenizer_json import FAST, disable_padding_and_truncation, largest_id
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.errors import UserError
from slipstream.shared.storage import STORES, MissingObject, list_names, read_below

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


#: Directory of the tokenizer in the prepared data.
TOKENIZER = "tokenizer"


def write_token_rows(
    directory: Path,
    splits: Mapping[str, np.ndarray],
    vocabulary: int,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> PreparedData:
    """Write prepared data of token rows into ``directory``, every split shuffled by ``seed``.

    ``splits`` maps "train", "validation" and optionally "test" to integers ``[rows, length + 1]``: a model gets the
    first ``length`` tokens of a row and predicts the last ``length``. All ids are below ``vocabulary``. The files of
    the directory ``tokenizer`` are stored with the rows and exported with a model. Raises ``UserError`` for other
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
    signature = Signature((tokens,), "next token", "next token", buckets=vocabulary)
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
