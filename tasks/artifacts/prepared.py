"""Prepared data, as preprocess writes it and every later stage reads it.

The artifact holds, for each split, one or more segments ``<split>-00000.rows`` of fixed-width little-endian records to
memory-map: the model's inputs in the order of the signature, then the target, then the row's weight if rows are
weighed. New files beside an earlier set become further segments. A large segment is cut into parts, which are files
after the first, called ``<split>-00000_00001.rows`` and so on. Rows are shuffled within a segment, through all of its
parts, when it is written, and a block of the manifest is a whole number of rows, so any block is a fair sample that can
be verified by itself. Beside them ``signature.json`` (what a model
takes and gives), ``schema.json`` and ``statistics.json`` (the transformation from raw columns to inputs, fitted on the
training split only), ``card.json`` (what was found in the data) and ``quarantine.parquet`` (rows set aside, with
reasons).
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts.format import Artifact, DamagedArtifact

KIND = "prepare"
SPLITS = ("train", "validation", "test")
TARGET = "target"
WEIGHT = "weight"
#: A sample comes from so many blocks at least.
SAMPLED_BLOCKS = 8
#: A block, by the name of its segment and its number there.
Block = tuple[str, int]


def segment_name(split: str, number: int, part: int) -> str:
    """The file of a part of a segment; names sort as they are counted."""
    return f"{split}-{number:05d}_{part:05d}.rows" if part else f"{split}-{number:05d}.rows"


def segment_number(name: str) -> int:
    """Which segment of its split a file belongs to."""
    return int(name.partition("-")[2].partition(".")[0].partition("_")[0])


@dataclass(frozen=True)
class TensorSpec:
    """One input of the model: ``[batch, *shape]`` of ``dtype`` (float32, int32 or uint8)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives.

    Tables have the inputs ``numeric`` (float32 ``[batch, F]``, standardised) and ``categorical`` (int32
    ``[batch, C]``, codes below ``cardinalities``) and ``tokens`` (int32 ``[batch, D, length]``, of each of D columns
    of documents the ids of its words, below ``buckets``), each of them absent when there is no such column; images have
    ``image`` (uint8 ``[batch, channels, height, width]``; the model itself standardises with ``image_mean`` and
    ``image_std``, per channel, in units of the stored values). A classifier gives logits ``[batch, classes]``; a
    regressor gives ``[batch, 1]``, in units of the target.
    """

    inputs: tuple[TensorSpec, ...]
    task: str  # "classification" or "regression"
    target: str
    classes: tuple[str, ...] = ()
    cardinalities: tuple[int, ...] = ()
    image_mean: tuple[float, ...] = ()
    image_std: tuple[float, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    #: The column that weighs the rows in training; empty: all weigh the same. Stored weights have a mean of 1 over the
    #: training split.
    weight: str = ""
    #: Ids that tokens may have, 0 for padding among them; 0 without texts.
    buckets: int = 0

    @property
    def outputs(self) -> int:
        return len(self.classes) if self.task == "classification" else 1

    @property
    def labels(self) -> tuple[TensorSpec, ...]:
        """What a stored row has beside the inputs: the target and, if rows are weighed, the weight."""
        target = TensorSpec(TARGET, "int32" if self.task == "classification" else "float32", ())
        return (target, TensorSpec(WEIGHT, "float32", ())) if self.weight else (target,)

    @property
    def record(self) -> np.dtype:
        """The dtype of one stored row: every field aligned to four bytes, the inputs first and then the labels."""
        names, formats, offsets, offset = [], [], [], 0
        for spec in (*self.inputs, *self.labels):
            scalar = np.dtype(spec.dtype).newbyteorder("<")
            names.append(spec.name)
            formats.append((scalar, spec.shape))
            offsets.append(offset)
            offset += -(-math.prod(spec.shape) * scalar.itemsize // 4) * 4
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Signature:
        inputs = tuple(TensorSpec(i["name"], i["dtype"], tuple(i["shape"])) for i in data["inputs"])
        lists = ("classes", "cardinalities", "image_mean", "image_std")
        return cls(**{**data, "inputs": inputs, **{name: tuple(data[name]) for name in lists}})


@dataclass(frozen=True)
class PreparedData:
    """Prepared data that is there."""

    artifact: Artifact
    signature: Signature

    @classmethod
    def open(cls, directory: Path) -> PreparedData:
        """Raises ``DamagedArtifact`` if the directory does not hold whole prepared data."""
        artifact = Artifact.open(directory, KIND)
        return cls(artifact, Signature.from_json(artifact.read_json("signature.json")))

    def segments(self, split: str) -> list[str]:
        """The file names of a split's segments and their parts, in order."""
        return sorted(name for name in self.artifact.files if name.startswith(f"{split}-") and name.endswith(".rows"))

    def segment_rows(self, split: str) -> tuple[int, ...]:
        """The number of rows in each file of a split."""
        return tuple(self.artifact.files[name].size // self.signature.record.itemsize for name in self.segments(split))

    def shuffled_rows(self, split: str) -> tuple[int, ...]:
        """The number of rows in each segment of a split, with all its parts: so many were shuffled together."""
        rows: Counter[int] = Counter()
        for name, count in zip(self.segments(split), self.segment_rows(split), strict=True):
            rows[segment_number(name)] += count
        return tuple(rows.values())

    def block_rows(self, split: str) -> int:
        """The rows of a block in a split's segments, which is the same in all of them."""
        sizes = {self.artifact.files[name].block_bytes for name in self.segments(split)}
        rows, rest = divmod(max(sizes, default=0), self.signature.record.itemsize)
        if len(sizes) != 1 or rest:
            raise DamagedArtifact(
                f"{self.artifact.directory}: the blocks of the {split} split are not equal whole rows"
            )
        return rows

    def mapped(self, segment: str) -> np.ndarray:
        """The records of a segment as uint8 ``[rows, record]``, memory-mapped and not verified."""
        raw = np.memmap(self.artifact.path(segment), np.uint8, mode="r")
        return raw.reshape(-1, self.signature.record.itemsize)

    def blocks(self, split: str) -> list[Block]:
        """The blocks of a split, in order."""
        files = self.artifact.files
        return [(name, number) for name in self.segments(split) for number in range(len(files[name].blocks))]

    def verified(self, blocks: list[Block]) -> Iterator[np.ndarray]:
        """The bytes of these blocks (uint8), each verified when it comes. Raises ``DamagedArtifact``."""
        for segment, of_segment in groupby(blocks, key=itemgetter(0)):
            raw, step = self.mapped(segment).reshape(-1), self.artifact.files[segment].block_bytes
            for _, number in of_segment:
                data = raw[number * step : (number + 1) * step]
                self.artifact.check_block(segment, number, data)
                yield data

    def split(self, name: str) -> np.ndarray:
        """All records of a split, every block verified first. Shape ``[rows]``, memory-mapped: several files are joined
        in one without a name, so that a large split does not have to fit into memory."""
        for _ in self.verified(self.blocks(name)):
            pass
        filled = [segment for segment in self.segments(name) if self.artifact.files[segment].size]
        parts = [self.mapped(segment).reshape(-1) for segment in filled]
        if len(parts) > 1:
            ends = np.cumsum([len(part) for part in parts]).tolist()
            with tempfile.TemporaryFile(dir=self.artifact.directory) as file:
                joined = np.memmap(file, np.uint8, "w+", shape=(ends[-1],))
            for end, part in zip(ends, parts, strict=True):
                joined[end - len(part) : end] = part
            parts = [joined]
        return parts[0].view(self.signature.record) if parts else np.empty(0, self.signature.record)

    def sample(self, name: str, most: int) -> np.ndarray:
        """``most`` records of a split, or all if there are fewer: evenly spread over blocks that are evenly spread over
        the split. No other blocks are read. Shape ``[rows]``."""
        blocks = self.blocks(name)
        if not blocks:
            return np.empty(0, self.signature.record)
        # Each segment may end with a short block.
        enough = max(SAMPLED_BLOCKS, -(-most // self.block_rows(name)) + len(self.segments(name)))
        chosen = [blocks[place] for place in evenly(len(blocks), enough)]
        records = np.concatenate([data.view(self.signature.record) for data in self.verified(chosen)])
        return records[evenly(len(records), most)]

    @property
    def card(self) -> dict[str, Any]:
        """What was found in the data: ``rows`` (read, kept, quarantined, and one per split), columns, warnings."""
        return self.artifact.read_json("card.json")


def evenly(length: int, most: int) -> np.ndarray:
    """``most`` numbers below ``length``, or all if there are fewer: ascending, the same distance apart."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))
