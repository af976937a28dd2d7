"""The last units of work: the runs of each split merged into the parts that the artifact will hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.artifacts.format import ArtifactWriter, FileRecord
from slipstream.artifacts.prepared.data import SPLITS, segment_name
from slipstream.prepare.progress import shown
from slipstream.prepare.shuffle.sorted_runs import Part, Run, merge, parts_of
from slipstream.prepare.workers.resume import ResumableScratch


@dataclass(frozen=True)
class MergeJob:
    """A part to be merged from the ``runs`` of its split, into a directory of its own in ``scratch``."""

    scratch: Path
    part: Part
    runs: list[Run]
    itemsize: int


@dataclass(frozen=True)
class MergedPart:
    """A part as it will be in the artifact."""

    file: Path
    part: Part
    record: FileRecord

    @property
    def digests(self) -> dict[str, str]:
        return {str(self.file): self.record.sha256}

    def enter(self, writer: ArtifactWriter, name: str) -> None:
        """Become the file ``name`` of an artifact."""
        writer.link(self.file, name, self.record)


def all_parts(rows: Sequence[int], itemsize: int) -> list[Part]:
    """The parts of all splits, which have so many ``rows``."""
    return [part for split, count in enumerate(rows) for part in parts_of(split, count, itemsize)]


def merge_all(place: ResumableScratch, runs: list[Run], itemsize: int) -> list[MergedPart]:
    """All parts of all splits, from all ``runs`` of records of ``itemsize`` bytes."""
    rows = [sum(run.rows for run in runs if run.split == split) for split in range(len(SPLITS))]
    parts = all_parts(rows, itemsize)
    shares = [rows[p.split] * (p.number + 1) // p.of - rows[p.split] * p.number // p.of for p in parts]
    return list(shown("merge", merge_parts(place, parts, runs, itemsize), shares))


def merge_parts(place: ResumableScratch, parts: list[Part], runs: list[Run], itemsize: int) -> Iterator[MergedPart]:
    of_split = [[run for run in runs if run.split == split] for split in range(len(SPLITS))]
    return place.map(merge_part, (MergeJob(place.root, part, of_split[part.split], itemsize) for part in parts))


def merge_part(job: MergeJob) -> MergedPart:
    """Runs in a worker process."""
    name = f"{SPLITS[job.part.split]}-{job.part.number}"
    directory = job.scratch / name
    shutil.rmtree(directory, ignore_errors=True)
    writer = ArtifactWriter(directory)
    merge(writer, f"{name}.rows", job.runs, job.itemsize, job.part)
    return MergedPart(directory / f"{name}.rows", job.part, writer.record(f"{name}.rows"))


def enter_segments(writer: ArtifactWriter, merged: list[MergedPart], number: int) -> None:
    """Make the parts of each split, which are in their order, its segment ``number``.

    Parts without rows are left out; only the first segment of a split may be without any.
    """
    for split, name in enumerate(SPLITS):
        mine = [part for part in merged if part.part.split == split]
        filled = [part for part in mine if part.record.size] or (mine[:1] if number == 0 else [])
        for place, part in enumerate(filled):
            part.enter(writer, segment_name(name, number, place))
