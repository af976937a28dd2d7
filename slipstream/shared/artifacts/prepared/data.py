"""Prepared data, written by the stage prepare and read by every later stage.

Every split has one or more segments of fixed-width little-endian records for memory mapping. A record holds the model's
inputs in signature order, the target, and the row's weight if rows are weighted. Rows added to a base set become
further segments. A segment is one file, ``<split>-00000.rows``; a large one continues in ``<split>-00000_00001.rows``
and so on. Rows are shuffled across all files of their segment, and a block of the manifest holds complete rows.

Further files: ``signature.json`` (inputs and outputs of a model), ``schema.json`` and ``statistics.json`` (the
transformation of raw columns to inputs, fitted on the training split only), ``card.json`` (the data card) and
``quarantine.parquet`` (rejected rows with reasons).
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.prepared.card import Card, read_card
from slipstream.shared.artifacts.records import read_record
from slipstream.shared.storage.names import number_in_name

KIND = "prepare"
SIGNATURE = "signature.json"
SPLITS = ("train", "validation", "test")
TARGET = "target"
WEIGHT = "weight"
DTYPES = ("float32", "float64", "int16", "int32", "int64", "uint8")
#: Version of rows of tokens: since 2, documents start as the tokenizer's post-processor says.
ROW_FORMAT = 2
#: Largest number of values in one input of a row: NumPy limits a record to 2 GiB.
MOST_VALUES = (1 << 27) - 1
#: Smallest number of blocks that :meth:`PreparedData.sample` reads, if the split has as many.
SAMPLED_BLOCKS = 8
#: Block of rows: file name, and index of the block in this file.
Block = tuple[str, int]


def segment_name(split: str, number: int, part: int) -> str:
    """Return the file name of part ``part`` of segment ``number``; names sort by number, then part."""
    return f"{split}-{number:05d}_{part:05d}.rows" if part else f"{split}-{number:05d}.rows"


def segment_number(name: str) -> int:
    """Return the segment number in a file name. Raises ``DamagedArtifact`` if there is none."""
    number = number_in_name(name.partition("-")[2].partition(".")[0].partition("_")[0], 5)
    if number is None:
        raise DamagedArtifact(f"{name}: has no segment number; expected a name such as {segment_name('train', 0, 0)}")
    return number


@dataclass(frozen=True)
class TensorSpec:
    """Input ``[batch, *shape]`` of a model, of a ``dtype`` in ``DTYPES``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: dtype {self.dtype}; expected {', '.join(DTYPES)}")
        if min(self.shape, default=0) < 0 or max(*self.shape, math.prod(self.shape), 1) > MOST_VALUES:
            raise ValueError(f"{self.name}: a row of shape {self.shape}; expected at most {MOST_VALUES} values")


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model.

    Tables have up to three inputs, depending on their columns: ``numeric`` (float32 ``[batch, F]``, standardised),
    ``categorical`` (int32 ``[batch, C]``, column c has codes below ``cardinalities[c]``) and ``tokens`` (int32
    ``[batch, D, length]``, word ids below ``buckets`` for D columns of free text). Images have ``image`` (uint8
    ``[batch, channels, height, width]``), which the model itself standardises by ``image_mean`` and ``image_std`` (per
    channel, 0 to 255). A classifier returns logits ``[batch, classes]``; a regressor returns ``[batch, 1]``, in units
    of the target.

    For the task "next token" the input is ``tokens`` (``[batch, length]``, ids below ``buckets``), a model returns
    logits ``[batch, length, buckets]``, and the target is the row shifted by one. A token without loss, such as a
    question's, is stored as -1 - id in rows of int16 or int32.
    """

    inputs: tuple[TensorSpec, ...]
    task: str  # "classification", "regression" or "next token"
    target: str
    classes: tuple[str, ...] = ()
    cardinalities: tuple[int, ...] = ()
    image_mean: tuple[float, ...] = ()
    image_std: tuple[float, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    #: Dtype of a regression's stored targets and of its model's outputs; earlier versions stored float32.
    target_dtype: str = "float32"
    #: Column of row weights, "" if rows are unweighted. Stored weights have mean 1 over the training split.
    weight: str = ""
    #: Vocabulary size, padding (id 0) included; 0 without tokens.
    buckets: int = 0
    #: Id of the token that separates documents in a row; attention stays within a document. -1: attention spans the
    #: row.
    document_end: int = -1
    #: Id that the tokenizer puts in front of a document, never with loss; -1: the end of the document before starts it.
    document_front: int = -1
    #: Mean number of tokens with loss per training row, by which a row's loss is divided; 0 if all tokens have loss.
    learned: float = 0.0
    #: :data:`ROW_FORMAT` of rows of tokens.
    row_format: int = 1

    @property
    def document_start(self) -> int:
        """Id of the first token of a document in a row; -1 if attention spans the row."""
        return self.document_front if self.document_front >= 0 and self.document_end >= 0 else self.document_end

    @property
    def conversations(self) -> bool:
        """True if rows are conversations."""
        return self.learned > 0 and self.document_front < 0

    def __post_init__(self) -> None:
        if self.target_dtype not in ("float32", "float64"):
            raise ValueError(f"target_dtype: {self.target_dtype}; expected float32 or float64")

    @property
    def output_dtype(self) -> str:
        """Dtype of a model's outputs."""
        return self.target_dtype if self.task == "regression" else "float32"

    @property
    def outputs(self) -> int:
        """Number of outputs per row, or per token for "next token": the size of the last dimension."""
        return {"classification": len(self.classes), "next token": self.buckets}.get(self.task, 1)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one row, without the batch dimension."""
        return (*self.inputs[0].shape, self.outputs) if self.task == "next token" else (self.outputs,)

    @property
    def labels(self) -> tuple[TensorSpec, ...]:
        """Fields of a stored row after the inputs: the target and, if rows are weighted, the weight."""
        if self.task == "next token":
            return (TensorSpec(TARGET, self.inputs[0].dtype, self.inputs[0].shape),)
        target = TensorSpec(TARGET, "int32" if self.task == "classification" else self.target_dtype, ())
        return (target, TensorSpec(WEIGHT, "float32", ())) if self.weight else (target,)

    @property
    def record(self) -> np.dtype:
        """NumPy dtype of one stored row: inputs, then labels, every field aligned to four bytes, or eight with float64.

        For "next token" a row stores length + 1 tokens once, and the fields input and target overlap.
        """
        if self.task == "next token":
            token, (length,) = np.dtype(self.inputs[0].dtype).newbyteorder("<"), self.inputs[0].shape
            places = {self.inputs[0].name: 0, TARGET: token.itemsize}
            return np.dtype(
                {
                    "names": list(places),
                    "formats": [(token, (length,))] * 2,
                    "offsets": list(places.values()),
                    "itemsize": token.itemsize * (length + 1),
                }
            )
        names, formats, offsets, offset = [], [], [], 0
        aligned = 8 if "float64" in [spec.dtype for spec in (*self.inputs, *self.labels)] else 4
        for spec in (*self.inputs, *self.labels):
            scalar = np.dtype(spec.dtype).newbyteorder("<")
            names.append(spec.name)
            formats.append((scalar, spec.shape))
            offsets.append(offset)
            offset += -(-math.prod(spec.shape) * scalar.itemsize // aligned) * aligned
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


@dataclass(frozen=True)
class PreparedData:
    artifact: Artifact
    signature: Signature

    @classmethod
    def open(cls, directory: Path) -> PreparedData:
        """Open prepared data. Raises ``DamagedArtifact`` if a file is missing or has an impossible size."""
        artifact = Artifact.open(directory, KIND)
        signature = read_record(artifact, SIGNATURE, Signature)
        if signature.task == "next token" and signature.row_format != ROW_FORMAT:
            raise DamagedArtifact(
                f"{directory / SIGNATURE}: rows of tokens have format {signature.row_format}; expected {ROW_FORMAT}; "
                "prepare the data again"
            )
        for name, file in artifact.files.items():
            if name.endswith(".rows") and file.size % signature.record.itemsize:
                raise DamagedArtifact(
                    f"{directory / name}: {file.size} bytes are not a multiple of the row size in {SIGNATURE}"
                )
        return cls(artifact, signature)

    def segments(self, split: str) -> list[str]:
        """Return the names of all ``.rows`` files of a split, in order."""
        return sorted(name for name in self.artifact.files if name.startswith(f"{split}-") and name.endswith(".rows"))

    def segment_rows(self, split: str) -> tuple[int, ...]:
        return tuple(self.artifact.files[name].size // self.signature.record.itemsize for name in self.segments(split))

    @property
    def training_rows(self) -> int:
        return sum(self.segment_rows("train"))

    def shuffled_rows(self, split: str) -> tuple[int, ...]:
        """Return the number of rows of every segment of a split, summed over its files."""
        rows: Counter[int] = Counter()
        for name, count in zip(self.segments(split), self.segment_rows(split), strict=True):
            rows[segment_number(name)] += count
        return tuple(rows.values())

    def block_rows(self, split: str) -> int:
        """Return the rows per block of a split. Raises ``DamagedArtifact`` if they differ between its files."""
        sizes = {self.artifact.files[name].block_bytes for name in self.segments(split)}
        rows, rest = divmod(max(sizes, default=0), self.signature.record.itemsize)
        if len(sizes) != 1 or rest:
            raise DamagedArtifact(
                f"{self.artifact.directory}: the blocks of the {split} split do not hold equal numbers of complete rows"
            )
        return rows

    def mapped(self, segment: str) -> np.ndarray:
        """Memory-map the file ``segment`` as uint8 ``[rows, bytes per row]``, without verifying digests."""
        # Truncating a mapped file ends the process by a bus error. An artifact's files are never truncated: they are
        # written once, renamed into place and only removed whole, which leaves a mapping valid. Opening checks their
        # sizes. A batch mixes rows from the whole segment, and all processes share its pages.
        with self.artifact.open_file(segment) as file:
            raw = np.memmap(file, np.uint8, mode="r")
        return raw.reshape(-1, self.signature.record.itemsize)

    def blocks(self, split: str) -> list[Block]:
        files = self.artifact.files
        return [(name, number) for name in self.segments(split) for number in range(len(files[name].blocks))]

    def verified(self, blocks: list[Block]) -> Iterator[np.ndarray]:
        """Yield the bytes (uint8) of every block. Raises ``DamagedArtifact`` if a digest differs."""
        for segment, of_segment in groupby(blocks, key=itemgetter(0)):
            raw, step = self.mapped(segment).reshape(-1), self.artifact.files[segment].block_bytes
            for _, number in of_segment:
                data = raw[number * step : (number + 1) * step]
                self.artifact.check_block(segment, number, data)
                yield data

    def split(self, name: str) -> np.ndarray:
        """Return all records of a split as a structured array ``[rows]``, after verifying every block.

        The array is memory-mapped, for splits larger than memory. Several files are first joined in an unnamed
        temporary file.
        """
        for _ in self.verified(self.blocks(name)):
            pass
        filled = [segment for segment in self.segments(name) if self.artifact.files[segment].size]
        parts = [self.mapped(segment).reshape(-1) for segment in filled]
        if len(parts) > 1:
            with tempfile.TemporaryFile(dir=self.artifact.directory) as file:
                for part in parts:
                    file.write(part.data)  # through a mapping, a full disk would be a bus error
                file.flush()
                parts = [np.memmap(file, np.uint8, "r")]
        return parts[0].view(self.signature.record) if parts else np.empty(0, self.signature.record)

    def sample(self, name: str, most: int) -> np.ndarray:
        """Return ``most`` records of a split, or all if there are fewer, as a structured array ``[rows]``.

        Only some blocks are read, evenly spaced in the split, as are the records in these.
        """
        blocks = self.blocks(name)
        if not blocks:
            return np.empty(0, self.signature.record)
        # Every segment may end with a short block.
        enough = max(SAMPLED_BLOCKS, -(-most // self.block_rows(name)) + len(self.segments(name)))
        chosen = [blocks[index] for index in evenly_spaced_indices(len(blocks), enough)]
        records = np.concatenate([data.view(self.signature.record) for data in self.verified(chosen)])
        return records[evenly_spaced_indices(len(records), most)]

    @property
    def card(self) -> Card:
        return read_card(self.artifact)


def evenly_spaced_indices(length: int, most: int) -> np.ndarray:
    """Return ``most`` evenly spaced indices below ``length``, ascending; all if ``length`` is smaller."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).astype(int))
