"""Prepared data of token rows: fixed length, one token id per place, for models that predict each next token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slipstream.artifacts.format import BLOCK_BYTES, ArtifactWriter
from slipstream.artifacts.prepared.card import CARD, DataCard
from slipstream.artifacts.prepared.data import KIND, SPLITS, PreparedData, Signature, TensorSpec
from slipstream.artifacts.records import write_record
from slipstream.errors import UserError

#: The files of a tokenizer, as Hugging Face's libraries write them beside a model. One of these is a tokenizer, the
#: others only complete one.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
FILES = (*VOCABULARIES, *OTHERS)


def tokenizer_files(directory: Path, vocabulary: int) -> list[Path]:
    """The files of the tokenizer in ``directory``.

    Raises ``UserError`` if there is none, or if its ``tokenizer.json`` has ids that a model of ``vocabulary`` tokens
    does not know.
    """
    paths = [directory / name for name in FILES if (directory / name).is_file()]
    if not any(path.name in VOCABULARIES for path in paths):
        raise UserError(f"{directory}: holds no tokenizer; expected one of {', '.join(VOCABULARIES)} in it")
    fast = directory / "tokenizer.json"
    if fast in paths and (largest := largest_id(fast)) >= vocabulary:
        raise UserError(f"{fast}: has the token id {largest}; the model knows 0 to {vocabulary - 1}")
    return paths


def largest_id(path: Path) -> int:
    """The largest token id of a ``tokenizer.json``. Raises ``UserError`` if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stored = content["model"]["vocab"]  # ids by token, or a list in which a token's place is its id
        ids = stored.values() if isinstance(stored, dict) else range(len(stored))
        return max([*ids, *(token["id"] for token in content.get("added_tokens") or ())], default=-1)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: no tokenizer of Hugging Face's tokenizers: {error!r}") from None


#: Where the tokenizer lies in the prepared data.
TOKENIZER = "tokenizer"


def write_token_rows(
    directory: Path,
    splits: Mapping[str, np.ndarray],
    vocabulary: int,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> PreparedData:
    """Write prepared data of token rows into ``directory``, each split shuffled by ``seed``.

    ``splits`` has integers ``[rows, length + 1]`` for "train" and "validation", and for "test" if there are such rows:
    a model is given the first ``length`` tokens of a row and predicts the last ``length``. All ids are below
    ``vocabulary``. The files of the ``tokenizer`` in a directory are kept beside the rows, and exported with a model.
    Raises ``UserError`` for arrays of other shapes, ids out of range, or if there is no tokenizer.
    """
    more = tokenizer_files(tokenizer, vocabulary) if tokenizer else []
    widths = {name: rows.shape[1:] for name, rows in splits.items()}
    if unknown := sorted(set(splits) - set(SPLITS)):
        raise UserError(f"{unknown[0]!r} is no split; expected {', '.join(SPLITS)}")
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
    for path in more:
        writer.write_bytes(f"{TOKENIZER}/{path.name}", path.read_bytes())
    counts = {name: len(splits.get(name, ())) for name in SPLITS}
    write_record(writer, "signature.json", signature)
    writer.write_json("schema.json", {"columns": []})
    writer.write_json("statistics.json", {"columns": {}})
    read = {"read": sum(counts.values()), "kept": sum(counts.values()), "quarantined": 0, **counts}
    writer.write_json(CARD, DataCard("", read, signature.task, signature.target, columns=[], classes={}).to_json())
    writer.finish(KIND, {"vocabulary": vocabulary, "seed": seed})
    return PreparedData.open(directory)
