"""The last units of work: the runs of each split merged into the file that the artifact will hold."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tasks.artifact import ArtifactWriter, FileRecord
from tasks.preprocess.prepared import SPLITS
from tasks.preprocess.shards import Run, merge
from tasks.preprocess.workplace import Workplace


@dataclass(frozen=True)
class Merging:
    """The runs of one split, to become the file ``name`` of records of ``itemsize`` bytes in ``directory``."""

    directory: Path
    name: str
    runs: list[Run]
    itemsize: int


@dataclass(frozen=True)
class Merged:
    """A split as it will be in the artifact."""

    file: Path
    record: FileRecord

    @property
    def digests(self) -> dict[str, str]:
        return {str(self.file): self.record.sha256}


def merge_splits(writer: ArtifactWriter, place: Workplace, runs: list[Run], itemsize: int, number: int = 0) -> None:
    """Write segment ``number`` of every split from its ``runs`` of records of ``itemsize`` bytes.

    Only the first segment of a split may be without rows.
    """

    def merged(index: int) -> Merged:
        split, mine = SPLITS[index], [run for run in runs if run.split == index]
        job = Merging(place.root / split, f"{split}-{number:05d}.rows", mine, itemsize)
        return place.once(f"merge-{split}", merge_split, job)

    due = [index for index in range(len(SPLITS)) if number == 0 or any(run.split == index for run in runs)]
    with ThreadPoolExecutor(len(SPLITS)) as beside:
        found = list(beside.map(merged, due))
    for done in found:
        writer.adopt(done.file, done.file.name, done.record)


def merge_split(job: Merging) -> Merged:
    shutil.rmtree(job.directory, ignore_errors=True)
    writer = ArtifactWriter(job.directory)
    merge(writer, job.name, job.runs, job.itemsize)
    return Merged(job.directory / job.name, writer.record(job.name))
