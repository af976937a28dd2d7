"""One-pass preparation of images: pixels are stored unchanged, and the model standardises them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from slipstream.pipeline.prepare.card import row_counts, with_skipped
from slipstream.pipeline.prepare.fit.fit import check_splits
from slipstream.pipeline.prepare.fit.splits import TEST, TRAIN, SplitOverlap, assign_splits, draw_missing
from slipstream.pipeline.prepare.progress import with_progress
from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.pipeline.prepare.shuffle import RunWriter, SortedRun, enter_segments, merge_all, order_keys
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.card import CARD, ColumnCard, DataCard, missing_classes
from slipstream.shared.artifacts.prepared.data import SPLITS, TARGET, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.given_splits import (
    folder_name,
    in_words,
    refuse_column,
    report_drawn,
    splits_of_files,
)
from slipstream.shared.source.images import DigitsPart, FolderPart, ImageChunk, ImageSet, Part, open_images
from slipstream.shared.source.quarantine import BadRow


@dataclass(frozen=True)
class EncodeImagesJob:
    """Job of one worker: encode a part of all images; ``first`` is the number of its first image of ``total``."""

    part: Part
    first: int
    total: int
    signature: Signature
    config: DataConfig
    scratch: Path
    #: Given split of every image of the part; None without given splits. Those of ``drawn`` are drawn.
    given: np.ndarray | None = None
    drawn: Sequence[int] = ()


@dataclass
class EncodedImages:
    """Result of encoding one or all parts: sorted runs, counts by class and split, and sums over training pixels.

    The sums are integers, thus exact and independent of the division into parts.
    """

    counts: np.ndarray  # int64 [classes, splits]
    sums: np.ndarray  # int64 [channels]: of pixels, and of their squares
    squares: np.ndarray
    low: int = 255
    high: int = 0
    runs: list[SortedRun] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    hashes: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    splits: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def nothing(cls, signature: Signature) -> EncodedImages:
        channels = np.zeros(signature.inputs[0].shape[0], np.int64)
        return cls(np.zeros((len(signature.classes), len(SPLITS)), np.int64), channels, channels.copy())

    @property
    def files(self) -> list[str]:
        return sorted({f"{run.path}.{part}" for run in self.runs for part in ("rows", "keys")})

    def merge(self, other: EncodedImages) -> None:
        self.counts += other.counts
        self.sums += other.sums
        self.squares += other.squares
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for name in ("runs", "bad", "hashes", "labels", "splits"):
            getattr(self, name).extend(getattr(other, name))


def encode_part(job: EncodeImagesJob) -> EncodedImages:
    """Read, hash, split and store one part; runs in a worker process."""
    encoded = EncodedImages.nothing(job.signature)
    first = job.first
    with RunWriter(job.scratch / f"run-{job.first:012d}") as writer:
        for chunk in job.part.chunks():
            add_chunk(chunk, first, job, writer, encoded)
            first += len(chunk.pixels)
    encoded.runs = writer.runs
    return encoded


def add_chunk(chunk: ImageChunk, first: int, job: EncodeImagesJob, writer: RunWriter, encoded: EncodedImages) -> None:
    records = np.zeros(len(chunk.pixels), job.signature.record)
    records[job.signature.inputs[0].name], records[TARGET] = chunk.pixels, chunk.labels
    if job.given is None:
        splits = assign_splits(chunk.hashes, job.config.split)
    else:
        given = job.given[first - job.first :][: len(records)]
        splits = draw_missing(given, chunk.hashes, job.drawn, job.config.split)
    order = order_keys(first, len(records), job.total, job.config.shuffle)
    for split in range(len(SPLITS)):
        chosen = np.flatnonzero(chunk.good & (splits == split))
        writer.add(split, chosen, order, records)
        encoded.counts[:, split] += np.bincount(chunk.labels[chosen], minlength=len(encoded.counts))
        if split == TRAIN and len(chosen):
            pixels = chunk.pixels[chosen].astype(np.int64)
            encoded.sums += pixels.sum(axis=(0, 2, 3))
            encoded.squares += (pixels * pixels).sum(axis=(0, 2, 3))
            encoded.low, encoded.high = min(encoded.low, int(pixels.min())), max(encoded.high, int(pixels.max()))
    encoded.bad += chunk.bad
    encoded.hashes.append(chunk.hashes[chunk.good])
    encoded.labels.append(chunk.labels[chunk.good])
    encoded.splits.append(splits[chunk.good])


def prepare_images(writer: ArtifactWriter, scratch: ResumableScratch, source: SourceToPrepare) -> None:
    """Write the prepared data of images; raise ``UserError`` for images that cannot be learned."""
    images, config = open_images(source), source.config
    signature = Signature(
        inputs=(TensorSpec("image", "uint8", images.shape),),
        task="classification",
        target=images.target,
        classes=images.classes,
    )
    rows = [part.rows for part in images.parts]
    drawn = drawn_of_images(source)
    jobs = (
        EncodeImagesJob(part, first, sum(rows), signature, config, scratch.root, given_splits(part, source), drawn)
        for part, first in zip(images.parts, accumulate(rows, initial=0), strict=False)
    )
    encoded = EncodedImages.nothing(signature)
    for part in with_progress("images", scratch.map(encode_part, jobs), rows):
        encoded.merge(part)
    quarantine.check_limit(encoded.bad, sum(rows), config.quarantine_limit)
    check_classes(images.classes, encoded)
    pixels = int(encoded.counts[:, TRAIN].sum()) * math.prod(images.shape[1:])
    means = [total / pixels for total in encoded.sums.tolist()]
    variances = [total / pixels - mean**2 for total, mean in zip(encoded.squares.tolist(), means, strict=True)]
    # Avoids division by zero for a constant channel.
    deviations = tuple(math.sqrt(variance) if variance > 0 else 1.0 for variance in variances)
    signature = replace(signature, image_mean=tuple(means), image_std=deviations)
    enter_segments(writer, merge_all(scratch, encoded.runs, signature.record.itemsize), number=0)
    quarantine.write_quarantine(writer, encoded.bad)
    write_record(writer, "signature.json", signature)
    writer.write_json("statistics.json", {"image_mean": signature.image_mean, "image_std": signature.image_std})
    columns = [{"name": "image", "type": "image", "role": "image"}]
    by_folder: dict[str, object] = {"drawn": drawn} if config.split.is_given else {}
    if by_folder and TEST not in drawn:
        by_folder["held_out"] = overlap_of(encoded).held_out()
    writer.write_json("schema.json", {"columns": columns, "target": signature.target, **by_folder})
    card = card_of(images, signature, sum(rows), encoded, given=config.split.is_given)
    card = replace(card, warnings=[*card.warnings, *in_words(drawn, config)])
    writer.write_json(CARD, with_skipped(card, source.listing).to_json())


def drawn_of_images(source: SourceToPrepare) -> list[int]:
    """Return the splits to draw from the training images; raise ``UserError`` for folders of other names."""
    config = source.config
    refuse_column(config)
    if not config.split.directories:
        return []
    if not source.files:
        raise UserError("data.split.directories: the digits of scikit-learn are in no folders; expected false")
    return report_drawn({folder_name(source.listing, file) for file in source.files}, config)


def given_splits(part: Part, source: SourceToPrepare) -> np.ndarray | None:
    """Return the given split of every image of a part; None without given splits."""
    if not source.config.split.directories:
        return None
    assert not isinstance(part, DigitsPart), "they are refused"
    files = part.files if isinstance(part, FolderPart) else (part.file,) * part.rows
    return splits_of_files(source.listing, files)


def check_classes(classes: tuple[str, ...], encoded: EncodedImages) -> None:
    usable = encoded.counts.sum(axis=1)
    few = [(name, count) for name, count in zip(classes, usable.tolist(), strict=True) if count < 2]
    if few:
        name, count = few[0]
        raise UserError(
            f"data: class {name!r} has {count} usable image{'s' if count != 1 else ''}, so it cannot be in both "
            "training and test images; add images or remove the class"
        )
    if len(classes) < 2:
        raise UserError(f"data: all images are of the class {classes[0]!r}; expected two or more classes")
    check_splits(encoded.counts.sum(axis=0).tolist())


def card_of(
    images: ImageSet, signature: Signature, read: int, encoded: EncodedImages, *, given: bool = False
) -> DataCard:
    channels, height, width = images.shape
    # One figure for all channels: the mean, and the deviation of all pixels from it.
    mean = sum(signature.image_mean) / channels
    square = sum(s * s + m * m for m, s in zip(signature.image_mean, signature.image_std, strict=True)) / channels
    column = ColumnCard(
        "image",
        f"uint8 {channels}x{height}x{width}",
        "image",
        missing=0,
        mean=mean,
        std=math.sqrt(max(0.0, square - mean * mean)),
        min=encoded.low,
        max=encoded.high,
    )
    of_classes = dict(zip(images.classes, encoded.counts.tolist(), strict=True))
    by_split = {name: dict(zip(SPLITS, counts, strict=True)) for name, counts in of_classes.items()}
    return DataCard(
        source=images.name,
        rows=row_counts(read, encoded.counts.sum(axis=0).tolist(), len(encoded.bad)),
        task=signature.task,
        target=signature.target,
        columns=[column],
        classes=by_split,
        warnings=[
            *images.warnings,
            *missing_classes(by_split),
            *(overlap_of(encoded).warnings() if given else duplicate_warnings(encoded)),
        ],
    )


def overlap_of(encoded: EncodedImages) -> SplitOverlap:
    return SplitOverlap(encoded.splits, encoded.hashes, times=[np.empty((0, 0))])


def duplicate_warnings(encoded: EncodedImages) -> list[str]:
    """Return warnings about duplicate images, and about duplicates with different labels."""
    hashes, labels = np.concatenate(encoded.hashes), np.concatenate(encoded.labels)
    order = np.lexsort((labels, hashes))
    same = hashes[order][1:] == hashes[order][:-1]
    if not same.any():
        return []
    differ = int(np.count_nonzero(same & (labels[order][1:] != labels[order][:-1])))
    warnings = [f"{np.count_nonzero(same):,} images are copies of others; copies share a split"]
    return warnings + ([f"{differ:,} of the copies have another label than the original"] if differ else [])
