"""Prepared data of token rows: fixed length, one token id per place, for models that predict each next token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slipstream.artifacts.format import BLOCK_BYTES, ArtifactWriter
from slipstream.artifacts.prepared.data import KIND, SPLITS, PreparedData, Signature, TensorSpec
from slipstream.artifacts.prepared.tokenizer import tokenizer_files
from slipstream.artifacts.records import write_record
from slipstream.errors import UserError

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
            found = f"ids from {rows.min()} to {rows.max()}"
            raise UserError(f"the {name} split has {found}; expected 0 to {vocabulary - 1}")
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
    writer.write_json("card.json", {"rows": {"read": sum(counts.values()), "kept": sum(counts.values()), **counts}})
    writer.finish(KIND, {"vocabulary": vocabulary, "seed": seed})
    return PreparedData.open(directory)
