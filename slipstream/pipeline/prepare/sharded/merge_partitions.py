"""Merge of a prepared table on several machines; each merges a *partition*, some parts of the splits.

Encoding machines write one sorted run per part, in a directory per partition, so that a merging machine downloads only
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from slipstream.pipeline.prepare.sharded.quarantine_spools import read_fitted
from slipstream.pipeline.prepare.shuffle import (
    PART_BYTES,
    MergedPart,
    SortedRun,
    SplitPart,
    all_parts,
    collect_run,
    merge_parts,
)
from slipstream.pipeline.prepare.table import FittedTable, data_card, write_table
from slipstream.shared.artifacts import exchange
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.distributed.pool import workers_for
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.files import check_unchanged
from slipstream.shared.storage import copy_within_s3


@dataclass(frozen=True)
class MergePlan:
    """Parts in every partition, with the transformation and sizes for encoding and merging."""

    transform: Transform
    rows: tuple[int, ...]
    partitions: list[list[SplitPart]]
    #: Memory for data of each process in GiB (``data.memory``).
    memory: float

    @classmethod
    def of(cls, fitting: FittedTable, number: int) -> MergePlan:
        """Plan at most ``number`` partitions, fewer for a small table."""
        rows, transform = fitting.scanned.rows, fitting.fitted.transform
        itemsize = transform.signature.record.itemsize
        parts = all_parts(rows, itemsize)
        number = min(number, len(parts), -(-sum(rows) * itemsize // PART_BYTES))
        cuts = [index * len(parts) // number for index in range(number + 1)]
        partitions = [parts[start:end] for start, end in pairwise(cuts)]
        return cls(transform, tuple(rows), partitions, fitting.opened.scan.config.memory)

    @property
    def itemsize(self) -> int:
        return self.transform.signature.record.itemsize

    def workers(self, partition: int) -> int:
        """Return the number of worker processes for merging a partition."""
        size = sum(self.rows[part.split] * self.itemsize // part.of for part in self.partitions[partition])
        return workers_for(size, self.memory)


@dataclass(frozen=True)
class SortedRuns:
    """Runs of one share for one partition; paths are file names."""

    runs: list[SortedRun]


@dataclass(frozen=True)
class MergedParts:
    """Parts of one partition; paths are file names."""

    parts: list[MergedPart]


def partition_directory(partition: int) -> str:
    return f"{partition:05d}"


def write_partitions(scratch: ResumableScratch, plan: MergePlan, runs: list[SortedRun], encoded: Path) -> None:
    """Sort the ``runs`` of a share by part, and write them to a directory per partition in ``encoded``."""
    for partition, parts in enumerate(plan.partitions):
        collected = list(scratch.map(collect_part, [(scratch.root, runs, plan.itemsize, part) for part in parts]))
        files = [Path(f"{run.path}.{kind}") for run in collected for kind in ("rows", "keys")]
        named = SortedRuns([replace(run, path=Path(run.path).name) for run in collected])
        exchange.write_part(encoded / partition_directory(partition), named, files)


def collect_part(job: tuple[Path, list[SortedRun], int, SplitPart]) -> SortedRun:
    """Collect the rows of one part from all runs; runs in a worker process."""
    scratch, runs, itemsize, part = job
    return collect_run(scratch / f"part-{part.split}-{part.number}", runs, itemsize, part)


def merge_partition(partition: int, plan: Path, encoded: list[Path], merged: Path) -> None:
    """Merge one partition; ``encoded`` are its directories, one per share.

    The rows are written to ``merged``, and their description to its summary.
    """
    planned = exchange.read_part(plan, MergePlan)
    runs = [
        replace(run, path=str(exchange.path_in(share, run.path)))
        for share in encoded
        for run in exchange.read_part(share, SortedRuns).runs
    ]
    with exchange.scratch_for(merged, planned.workers(partition)) as scratch:
        parts = list(merge_parts(scratch, planned.partitions[partition], runs, planned.itemsize))
        merged.mkdir()
        for part in parts:
            part.file.rename(merged / part.file.name)
    named = MergedParts([replace(part, file=Path(part.file.name)) for part in parts])
    exchange.write_part(merged / exchange.SUMMARY, named)
    exchange.write_part(merged)


def assemble_artifact(
    directory: Path, made_by: Mapping[str, object], fitted: Path, merged: list[MergedPart], home: str = ""
) -> None:
    """Write the prepared data to the new ``directory``, equal to that of ``slipstream.pipeline.prepare.engine``.

    With ``home`` on S3, the rows are copied there instead.
    """
    fitting = read_fitted(fitted)
    card = data_card(fitting)
    source = fitting.opened.source
    check_unchanged(source.listing.files)
    if source.base:
        source.base.verify()
    writer = ArtifactWriter(directory)
    write_table(writer, fitting, merged, card, home)
    writer.write_manifest(KIND, made_by)


def local_parts(merged: Path) -> list[MergedPart]:
    exchange.verify_part(merged)
    summary = exchange.read_part(merged / exchange.SUMMARY, MergedParts)
    return [replace(part, file=exchange.path_in(merged, part.file)) for part in summary.parts]


@dataclass(frozen=True)
class CopiedPart(MergedPart):
    """Part in the directory ``source`` on S3, which :meth:`enter` copies to ``home`` within S3."""

    source: str
    home: str

    def enter(self, writer: ArtifactWriter, name: str) -> None:
        copy_within_s3(f"{self.source}/{self.file}", f"{self.home}/{name}", self.record.size, self.record.sha256)
        writer.note(name, self.record)


def s3_parts(summary: Path, source: str, home: str) -> list[MergedPart]:
    """Return the parts of a merged partition in ``source`` on S3, from its downloaded ``summary``."""
    merged = exchange.read_part(summary, MergedParts)
    return [
        CopiedPart(Path(exchange.path_in(summary, part.file).name), part.part, part.record, source, home)
        for part in merged.parts
    ]
