"""Images to prepared data, in one pass: what is stored are the pixels, and the model itself standardises them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import SPLITS, TARGET, Signature, TensorSpec
from slipstream.artifacts.records import write_record
from slipstream.errors import UserError
from slipstream.prepare import quarantine
from slipstream.prepare.card.data_card import row_counts
from slipstream.prepare.config import DataConfig
from slipstream.prepare.fit.fit import check_splits
from slipstream.prepare.fit.splits import TRAIN, assign
from slipstream.prepare.progress import say_goes_on, shown
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.shuffle.merge import enter_segments, merge_all
from slipstream.prepare.shuffle.sorted_runs import Run, RunWriter, order_keys
from slipstream.prepare.source.files import IMAGE_FORMATS, Listing, format_of
from slipstream.prepare.source.images.sets import Chunk, ImageSet, Part, open_arrays, open_folders
from slipstream.prepare.workers.resume import ResumableScratch

#: Settings that images have no use for; nobody shall believe that they count.
FOR_TABLES = ("columns", "drop", "id", "group", "time", "weight", "types", "earlier")


def holds_images(data: Listing, config: DataConfig) -> bool:
    """Whether ``data`` is images and not a table: as data.format says, else by the extensions of its files."""
    if config.format != "auto":
        return config.format in IMAGE_FORMATS
    return any(file.known_format in IMAGE_FORMATS for file in data.files)


def open_images(data: Listing, target: str, config: DataConfig) -> ImageSet:
    """Find the images. Raises ``UserError`` for what is wrong."""
    for name in FOR_TABLES:
        if getattr(config, name):
            raise UserError(f"data.{name}: is for tables, but {data.address!r} holds images; leave it out")
    if config.task == "regression":
        raise UserError("data.task: images are learned as classes; regression is for tables")
    formats = {format_of(file, config.format) for file in data.files}
    if len(formats) > 1:
        raise UserError(f"data: {data.address!r} mixes {' and '.join(sorted(formats))} files; expected one format")
    opener = open_folders if formats == {"images"} else open_arrays
    return opener(data, list(data.files), target, config)


@dataclass(frozen=True)
class PartJob:
    """One part of the images, whose first is number ``first`` of ``total``."""

    part: Part
    first: int
    total: int
    signature: Signature
    config: DataConfig
    scratch: Path


@dataclass
class EncodedImages:
    """The result of encoding a part, or all of them: sorted runs, counts by class and split, sums over the training
    pixels.

    Sums of whole numbers are exact, so that they do not depend on how the images are cut into parts.
    """

    counts: np.ndarray  # int64 [classes, splits]
    sums: np.ndarray  # int64 [channels]: of pixels, and of their squares
    squares: np.ndarray
    low: int = 255
    high: int = 0
    runs: list[Run] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    hashes: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)

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
        for name in ("runs", "bad", "hashes", "labels"):
            getattr(self, name).extend(getattr(other, name))


def encode_part(job: PartJob) -> EncodedImages:
    """Read, hash, split and store one part. Runs in a worker process."""
    found = EncodedImages.nothing(job.signature)
    first = job.first
    with RunWriter(job.scratch / f"run-{job.first:012d}") as writer:
        for chunk in job.part.chunks():
            add_chunk(chunk, first, job, writer, found)
            first += len(chunk.pixels)
    found.runs = writer.runs
    return found


def add_chunk(chunk: Chunk, first: int, job: PartJob, writer: RunWriter, found: EncodedImages) -> None:
    records = np.zeros(len(chunk.pixels), job.signature.record)
    records[job.signature.inputs[0].name], records[TARGET] = chunk.pixels, chunk.labels
    splits = assign(chunk.hashes, job.config.split)
    order = order_keys(first, len(records), job.total, job.config.shuffle)
    for split in range(len(SPLITS)):
        chosen = np.flatnonzero(chunk.good & (splits == split))
        writer.add(split, chosen, order, records)
        found.counts[:, split] += np.bincount(chunk.labels[chosen], minlength=len(found.counts))
        if split == TRAIN and len(chosen):
            pixels = chunk.pixels[chosen].astype(np.int64)
            found.sums += pixels.sum(axis=(0, 2, 3))
            found.squares += (pixels * pixels).sum(axis=(0, 2, 3))
            found.low, found.high = min(found.low, int(pixels.min())), max(found.high, int(pixels.max()))
    found.bad += chunk.bad
    found.hashes.append(chunk.hashes[chunk.good])
    found.labels.append(chunk.labels[chunk.good])


def prepare_images(writer: ArtifactWriter, place: ResumableScratch, pictures: ImageSet, config: DataConfig) -> None:
    """Write the prepared data of ``pictures``. Raises ``UserError`` for images that cannot be learned."""
    signature = Signature(
        inputs=(TensorSpec("image", "uint8", pictures.shape),),
        task="classification",
        target=pictures.target,
        classes=pictures.classes,
    )
    say_goes_on(place.found)
    rows = [part.rows for part in pictures.parts]
    jobs = part_jobs(pictures, sum(rows), signature, config, place.root)
    found = EncodedImages.nothing(signature)
    for part in shown("images", place.map(encode_part, jobs), rows):
        found.merge(part)
    quarantine.check_limit(found.bad, sum(rows), config.quarantine_limit)
    check_classes(pictures.classes, found)
    pixels = int(found.counts[:, TRAIN].sum()) * math.prod(pictures.shape[1:])
    means = [total / pixels for total in found.sums.tolist()]
    variances = [total / pixels - mean**2 for total, mean in zip(found.squares.tolist(), means, strict=True)]
    signature = Signature(
        **{
            **vars(signature),
            "image_mean": tuple(means),
            # A channel of one value has nothing to divide by.
            "image_std": tuple(math.sqrt(variance) if variance > 0 else 1.0 for variance in variances),
        }
    )
    enter_segments(writer, merge_all(place, found.runs, signature.record.itemsize), number=0)
    quarantine.write(writer, found.bad)
    write_record(writer, "signature.json", signature)
    writer.write_json("statistics.json", {"image_mean": signature.image_mean, "image_std": signature.image_std})
    columns = [{"name": "image", "type": "image", "role": "image"}]
    writer.write_json("schema.json", {"columns": columns, "target": signature.target})
    writer.write_json("card.json", card_of(pictures, signature, sum(rows), found))


def part_jobs(
    pictures: ImageSet, total: int, signature: Signature, config: DataConfig, scratch: Path
) -> Iterator[PartJob]:
    first = 0
    for part in pictures.parts:
        yield PartJob(part, first, total, signature, config, scratch)
        first += part.rows


def check_classes(classes: tuple[str, ...], found: EncodedImages) -> None:
    usable = found.counts.sum(axis=1)
    few = [(name, count) for name, count in zip(classes, usable.tolist(), strict=True) if count < 2]
    if few:
        name, count = few[0]
        raise UserError(
            f"data: class {name!r} has {count} usable image{'s' if count != 1 else ''}, so it cannot be both learned "
            "and tested; add images or take the class away"
        )
    if len(classes) < 2:
        raise UserError(f"data: all images are of the class {classes[0]!r}; expected two or more classes")
    check_splits(found.counts.sum(axis=0).tolist())


def card_of(pictures: ImageSet, signature: Signature, read: int, found: EncodedImages) -> dict[str, Any]:
    count, height, width = pictures.shape
    column = {"name": "image", "role": "image", "type": f"uint8 {count}x{height}x{width}", "missing": 0}
    spread: dict[str, float] = {"min": found.low, "max": found.high}
    # One figure for all channels: the mean, and the deviation of all pixels from it.
    mean = sum(signature.image_mean) / count
    square = sum(s * s + m * m for m, s in zip(signature.image_mean, signature.image_std, strict=True)) / count
    spread |= {"mean": mean, "std": math.sqrt(max(0.0, square - mean * mean))}
    unseen = [
        f"class {name!r} has no training row: its {sum(row)} rows all fell into other splits"
        for name, row in zip(pictures.classes, found.counts.tolist(), strict=True)
        if row[TRAIN] == 0
    ]
    return {
        "source": pictures.name,
        "rows": row_counts(read, found.counts.sum(axis=0).tolist(), len(found.bad)),
        "task": signature.task,
        "target": signature.target,
        "columns": [column | spread],
        "classes": {
            name: dict(zip(SPLITS, row, strict=True))
            for name, row in zip(pictures.classes, found.counts.tolist(), strict=True)
        },
        "warnings": [*pictures.warnings, *unseen, *duplicates(found)],
    }


def duplicates(found: EncodedImages) -> list[str]:
    """A word on pictures that are there more than once, and on those that then have different labels."""
    hashes, labels = np.concatenate(found.hashes), np.concatenate(found.labels)
    order = np.lexsort((labels, hashes))
    same = hashes[order][1:] == hashes[order][:-1]
    if not same.any():
        return []
    differ = int(np.count_nonzero(same & (labels[order][1:] != labels[order][:-1])))
    words = [f"{np.count_nonzero(same):,} images are copies of others; copies share a split"]
    return words + ([f"{differ:,} of the copies have another label than the original"] if differ else [])
