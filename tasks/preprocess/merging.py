"""The last units of work: the runs of each split merged into the parts that the artifact will hold."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tasks.artifact import ArtifactWriter, FileRecord
from tasks.preprocess.prepared import SPLITS
from tasks.preprocess.progress import shown
from tasks.preprocess.shards import Run, merge, parts_of
from tasks.preprocess.workplace import Workplace


@dataclass(frozen=True)
class Merging:
    """The runs of one split, of which number ``part`` of ``parts`` is to become a file in the fresh ``directory``."""

    directory: Path
    split: str
    runs: list[Run]
    itemsize: int
    part: int
    parts: int


@dataclass(frozen=True)
class Merged:
    """A part of a split as it will be in the artifact."""

    file: Path
    split: str
    part: int
    record: FileRecord

    @property
    def digests(self) -> dict[str, str]:
        return {str(self.file): self.record.sha256}


def merge_splits(writer: ArtifactWriter, place: Workplace, runs: list[Run], itemsize: int, number: int = 0) -> None:
    """Write every split, from its ``runs`` of records of ``itemsize`` bytes, as the segments ``number`` and on."""
    jobs, rows = [], []
    for index, split in enumerate(SPLITS):
        mine = [run for run in runs if run.split == index]
        total = sum(run.rows for run in mine)
        parts = parts_of(total, itemsize)
        jobs += [Merging(place.root / f"{split}-{part}", split, mine, itemsize, part, parts) for part in range(parts)]
        rows += [total * (part + 1) // parts - total * part // parts for part in range(parts)]
    adopt_parts(writer, list(shown("merge", place.map(merge_part, jobs), rows)), number)


def merge_part(job: Merging) -> Merged:
    """Runs in a worker process."""
    shutil.rmtree(job.directory, ignore_errors=True)
    writer = ArtifactWriter(job.directory)
    name = f"{job.split}.rows"
    merge(writer, name, job.runs, job.itemsize, job.part, job.parts)
    return Merged(job.directory / name, job.split, job.part, writer.record(name))


def adopt_parts(writer: ArtifactWriter, merged: list[Merged], number: int) -> None:
    """Take up the parts as segments, the first of each split as segment ``number``.

    Parts without rows are left out; only a split that has no row at all has one segment without any.
    """
    for split in SPLITS:
        mine = [part for part in merged if part.split == split]
        filled = [part for part in mine if part.record.size] or (mine[:1] if number == 0 else [])
        for place, part in enumerate(filled):
            writer.adopt(part.file, f"{split}-{number + place:05d}.rows", part.record)
