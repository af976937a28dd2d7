"""One table prepared by several machines: the same functions as on one, each over a share of the units.

parse (each share of text files) → open → scan (each share) → fit → encode (each share) → merge (each partition,
:mod:`slipstream.prepare.sharded.merge_partitions`) → assemble. The steps exchange the artifacts of
:mod:`slipstream.artifacts.exchange`. Partial results are passed on per unit, not aggregated, and are merged in
the order of the units: so the bytes are those of one machine, whatever the number of shares.

Parquet and Arrow are read where they lie, by whoever has the share. Text is first made columnar, and of that each share
has its *spool*. A file of text is parsed by one machine however large it is: where its records begin is known only to
who reads it from the beginning. If a column turns out not to be of the type that the first rows suggest, one machine
reads all files again, with this column as text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from slipstream.artifacts import exchange
from slipstream.distributed.pool import workers_for
from slipstream.prepare.fit.scan import Scan, ScanResult
from slipstream.prepare.resolve import SourceToPrepare
from slipstream.prepare.sharded.merge_partitions import MergePlan, write_partitions
from slipstream.prepare.table import OpenedTable, encode_units, fit_table, open_table, scan_units
from slipstream.source.columnar import LINE, TableInput, Unit, write_spool
from slipstream.source.files import SourceFile, unchanged
from slipstream.source.text.text_tables import (
    TextPiece,
    TextPlan,
    input_of,
    make_columnar,
    plan_text,
    replan,
    text_jobs,
)

#: What a value takes in memory, about.
CELL_BYTES = 8


# Text: each machine parses a share of the files


@dataclass(frozen=True)
class TextShare:
    """Files that one machine parses and, once it has, their ``pieces``, whose paths are names of files."""

    plan: TextPlan
    pieces: tuple[TextPiece, ...] = ()

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        return workers_for(sum(file.size for file in self.plan.files), self.plan.config.memory)


def open_texts(source: SourceToPrepare, number: int, directory: Path) -> list[Path]:
    """Cut files of text into at most ``number`` shares, each in a directory in ``directory``."""
    with unchanged(source.files):
        plans = cut_plan(plan_text(source), number)
    return [exchange.write(directory / f"{index:05d}", TextShare(plan)) for index, plan in enumerate(plans)]


def cut_plan(plan: TextPlan, number: int) -> list[TextPlan]:
    """At most ``number`` plans for consecutive files, of about the same size if no file is too large for that."""
    sizes = [file.size for file in plan.files]
    total = sum(sizes)
    # A file belongs to the share in which its middle lies.
    shares = [(2 * end - size) * number // (2 * total) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    plans = []
    for _, indices in groupby(range(len(sizes)), lambda index: shares[index]):
        mine = list(indices)
        plans.append(replace(plan, files=[plan.files[i] for i in mine], names=[plan.names[i] for i in mine]))
    return plans


def parse_share(share: Path, parsed: Path) -> None:
    """Make the files of one share columnar: the pieces in ``parsed``, and what describes them in its summary, with the
    times alone if rows are split by time."""
    mine = exchange.read(share, TextShare)
    with unchanged(mine.plan.files), exchange.scratch_for(parsed, mine.workers) as scratch:
        pieces = list(scratch.map(make_columnar, text_jobs(mine.plan, scratch.root)))
        named = tuple(replace(piece, path=Path(piece.path.name)) for piece in pieces)
        column = mine.plan.config.time
        times = [times_of(piece, column) for piece in pieces] if column else []
        exchange.write(parsed / exchange.SUMMARY, replace(mine, pieces=named), times)
        exchange.write(parsed, files=[piece.path for piece in pieces])


def times_of(piece: TextPiece, column: str) -> Path:
    """A spool of the same name that holds one column; the lines alone if the directories give it."""
    path = piece.path.parent / "times" / piece.path.name
    path.parent.mkdir(exist_ok=True)
    # Mapped, because this process has just written the file, and nobody else knows of it.
    batch = pa.ipc.open_file(pa.memory_map(str(piece.path))).get_batch(0)
    write_spool(path, batch.select([column if column in piece.types else LINE]))
    return path


def input_of_shares(summaries: list[Path]) -> TableInput | None:
    """All shares as one input, whose units lie in the directories ``summaries``; ``None`` if the text has to be read
    again."""
    parsed = [(directory, exchange.read(directory, TextShare)) for directory in summaries]
    files = [file for _, share in parsed for file in share.plan.files]
    names = [columns for _, share in parsed for columns in share.plan.names]
    plan = replace(parsed[0][1].plan, files=files, names=names)
    pieces = [
        replace(piece, path=exchange.path_in(directory, piece.path))
        for directory, share in parsed
        for piece in share.pieces
    ]
    return None if replan(pieces, plan) else input_of(pieces, plan)


# All tables: each machine scans and encodes a share of the units


@dataclass(frozen=True)
class Share:
    """Units that one machine scans and then encodes. ``uri`` of those that were text is a name in their spool."""

    scan: Scan
    units: list[Unit]

    @property
    def files(self) -> list[SourceFile]:
        """Those of the raw data that are read with it: none of text, which is in the spool."""
        return list(dict.fromkeys(unit.source for unit in self.units if not unit.spooled))

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        cells = sum(unit.rows for unit in self.units) * len(self.scan.types)
        return workers_for(CELL_BYTES * cells, self.scan.config.memory)


@dataclass(frozen=True)
class ScannedShare:
    """What the first pass found in each unit of a share."""

    units: list[ScanResult]


class OpenedShares(NamedTuple):
    """The directories of an opened table, of its shares and, unless they were parsed before, of their spools."""

    table: Path
    shares: list[Path]
    spools: list[Path]


def open_shares(source: SourceToPrepare, number: int, summaries: list[Path], directory: Path) -> OpenedShares:
    """Open the table and cut it into at most ``number`` shares, all in ``directory``. Text that was parsed, of which
    these are the ``summaries``, stays in the shares in which it was.
    """
    parsed = input_of_shares(summaries) if summaries else None
    files = source.listing.files
    workers = 1 if parsed else workers_for(source.size, source.config.memory)
    with unchanged(files), exchange.scratch_for(directory, workers) as scratch:
        table = open_table(source, scratch, parsed)
        units = table.input.units
        if parsed:
            pieces = [[unit for unit in units if Path(unit.uri).parent == summary] for summary in summaries]
            spools = []
        else:
            number = min(number, len(units))
            pieces = [units[i * len(units) // number : (i + 1) * len(units) // number] for i in range(number)]
            spools = [
                exchange.write(directory / f"spools/{index:05d}", files=[Path(u.uri) for u in mine if u.spooled])
                for index, mine in enumerate(pieces)
            ]
        shares = [
            exchange.write(directory / f"shares/{index:05d}", Share(table.scan, [u.moved(file_name) for u in mine]))
            for index, mine in enumerate(pieces)
        ]
        return OpenedShares(exchange.write(directory / "table", table), shares, spools)


def file_name(uri: str) -> str:
    return Path(uri).name


def read_share(directory: Path, spool: Path) -> Share:
    share = exchange.read(directory, Share)
    exchange.verify(spool)
    return replace(share, units=[unit.moved(lambda name: str(exchange.path_in(spool, name))) for unit in share.units])


def scan_share(share: Path, spool: Path, scanned: Path) -> None:
    """The first pass over one share."""
    mine = read_share(share, spool)
    with unchanged(mine.files), exchange.scratch_for(scanned, mine.workers) as scratch:
        exchange.write(scanned, ScannedShare(list(scan_units(scratch, mine.scan, mine.units))))


def fit_shares(table: Path, scanned: list[Path], number: int, fitted: Path, plan: Path) -> int:
    """Fit on what was found in all shares, and plan to merge in at most ``number`` partitions; how many they are."""
    opened = exchange.read(table, OpenedTable)
    fitting = fit_table(opened, (unit for share in scanned for unit in exchange.read(share, ScannedShare).units))
    planned = MergePlan.of(fitting, number)
    exchange.write(fitted, fitting)
    exchange.write(plan, planned)
    return len(planned.partitions)


def encode_share(share: Path, spool: Path, scanned: Path, plan: Path, encoded: Path) -> None:
    """The second pass over one share, written partition by partition."""
    mine = read_share(share, spool)
    planned = exchange.read(plan, MergePlan)
    rejected = [rows for unit in exchange.read(scanned, ScannedShare).units for rows in unit.rejected]
    with unchanged(mine.files), exchange.scratch_for(encoded, mine.workers) as scratch:
        units = list(encode_units(scratch, mine.scan, planned.transform, mine.units, rejected))
        write_partitions(scratch, planned, [run for unit in units for run in unit.runs], encoded)
    exchange.write(encoded)
