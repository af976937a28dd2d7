"""A prepared table merged by several machines: each merges a *lot*, some parts of the splits.

Who encodes a share of the table hands on one sorted run for each part, apart for each lot, so that who merges a lot
fetches that alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.artifacts.format import ArtifactWriter
from tasks.artifacts.prepared import KIND
from tasks.hardware.cpus import usable_cores
from tasks.preprocess.cluster.exchange import SAID, beside, hand_over, take_over
from tasks.preprocess.columns.transform import Transform
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import Fitting, card_of, prepare, write_table
from tasks.preprocess.pool.resume import Workplace
from tasks.preprocess.pool.workers import WORTH_SPREADING
from tasks.preprocess.read.files import Listing
from tasks.preprocess.shuffle.merge import Merged, all_parts, merge_parts
from tasks.preprocess.shuffle.sorted_runs import PART_BYTES, Part, Run, collect
from tasks.storage import copy_within_s3


@dataclass(frozen=True)
class Plan:
    """What encoding and merging have to know: ``lots`` of parts, each of which is merged by one machine."""

    transform: Transform
    rows: tuple[int, ...]
    lots: list[list[Part]]

    @classmethod
    def of(cls, fitting: Fitting, number: int) -> Plan:
        """At most ``number`` lots, fewer if they would be small."""
        rows, transform = fitting.found.rows, fitting.fitted.transform
        itemsize = transform.signature.record.itemsize
        parts = all_parts(rows, itemsize)
        number = min(number, len(parts), -(-sum(rows) * itemsize // PART_BYTES))
        lots = [parts[lot * len(parts) // number : (lot + 1) * len(parts) // number] for lot in range(number)]
        return cls(transform, tuple(rows), lots)

    @property
    def itemsize(self) -> int:
        return self.transform.signature.record.itemsize

    def workers(self, lot: int) -> int:
        """The processes that are worth starting for a lot."""
        size = sum(self.rows[part.split] * self.itemsize // part.of for part in self.lots[lot])
        return usable_cores() if size > WORTH_SPREADING else 1


def name_of(lot: int) -> str:
    """The directory of a lot in what a share hands on."""
    return f"{lot:05d}"


def hand_over_lots(place: Workplace, plan: Plan, runs: list[Run], encoded: Path) -> None:
    """Hand on what a share has for each lot: its ``runs``, sorted by parts."""
    for lot, parts in enumerate(plan.lots):
        collected = list(place.map(collect_part, [(place.root, runs, plan.itemsize, part) for part in parts]))
        files = [Path(f"{run.path}.{kind}") for run in collected for kind in ("rows", "keys")]
        hand_over(encoded / name_of(lot), [replace(run, path=Path(run.path).name) for run in collected], files)


def collect_part(job: tuple[Path, list[Run], int, Part]) -> Run:
    """Runs in a worker process."""
    scratch, runs, itemsize, part = job
    return collect(scratch / f"part-{part.split}-{part.number}", runs, itemsize, part)


def merge_lot(lot: int, plan: Path, encoded: list[Path], merged: Path) -> None:
    """Merge the parts of one lot. ``encoded`` is what each share has for it; in ``merged`` what is said of the parts
    is in a directory of its own."""
    planned: Plan | None = take_over(plan)
    done: list[Merged] = []
    if planned:
        runs = [replace(run, path=str(share / run.path)) for share in encoded for run in take_over(share)]
        parts = planned.lots[lot]
        with beside(merged, planned.workers(lot)) as place:
            done = list(merge_parts(place, parts, runs, planned.itemsize))
            merged.mkdir()
            for part in done:
                part.file.rename(merged / part.file.name)
    hand_over(merged / SAID, [replace(part, file=Path(part.file.name)) for part in done])
    hand_over(merged, None)


def assemble(
    directory: Path,
    data: Listing,
    target: str,
    config: DataConfig,
    made_by: Mapping[str, Any],
    found: Path,
    merged: list[Merged],
    home: str = "",
) -> None:
    """The prepared data in the fresh ``directory``, as :func:`tasks.preprocess.engine.prepare` makes it; without the
    rows that lie on S3 and were copied to ``home`` there."""
    fitting: Fitting | None = take_over(found)
    if fitting is None:
        prepare(directory, data, target, config, made_by)
        return
    card = card_of(fitting, data)
    data.check_unchanged()
    writer = ArtifactWriter(directory)
    write_table(writer, fitting, merged, card, home)
    writer.write_manifest(KIND, made_by)


def parts_in(merged: Path) -> list[Merged]:
    """The parts of a lot that lies on this machine."""
    take_over(merged)
    return [replace(part, file=merged / part.file) for part in take_over(merged / SAID)]


@dataclass(frozen=True)
class Copied(Merged):
    """A part that lies on S3 in the directory ``source``, and is copied there to ``home`` without coming here."""

    source: str
    home: str

    def enter(self, writer: ArtifactWriter, name: str) -> None:
        copy_within_s3(f"{self.source}/{self.file}", f"{self.home}/{name}")
        writer.note(name, self.record)


def parts_on_s3(said: Path, source: str, home: str) -> list[Merged]:
    """The parts of a lot in the directory ``source`` on S3, of which ``said`` is here."""
    return [Copied(**vars(part), source=source, home=home) for part in take_over(said)]
