"""One table prepared by several machines: the same functions as on one, each over a share of the units.

parse (each share of text files, :mod:`slipstream.prepare.sharded.csv_parsing`) → open → scan (each share) → fit →
encode (each share) → merge (each partition, :mod:`slipstream.prepare.sharded.merge_partitions`) → assemble. The steps
exchange the artifacts of :mod:`slipstream.prepare.sharded.exchange`. Partial results are passed on per unit, not
aggregated, and are merged in the order of the units: so the bytes are those of one machine, whatever the number of
shares.

Parquet and Arrow are read where they lie, by whoever has the share. Text is first made columnar, and of that each share
has its *spool*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slipstream.prepare.fit.encode import encode_units
from slipstream.prepare.fit.scan import Scan, ScanResult
from slipstream.prepare.resolve import ResolvedSource
from slipstream.prepare.sharded import exchange
from slipstream.prepare.sharded.csv_parsing import input_of_shares
from slipstream.prepare.sharded.merge_partitions import MergePlan, write_partitions
from slipstream.prepare.source.columnar import Unit
from slipstream.prepare.source.files import SourceFile, unchanged
from slipstream.prepare.table import OpenedTable, fit_table, open_table, scan_units
from slipstream.prepare.workers.pool import workers_for

#: What a value takes in memory, about.
CELL_BYTES = 8


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


def open_shares(source: ResolvedSource, number: int, summaries: list[Path], directory: Path) -> OpenedShares:
    """Open the table and cut it into at most ``number`` shares, all in ``directory``. Text that was parsed, of which
    these are the ``summaries``, stays in the shares in which it was.
    """
    parsed = input_of_shares(summaries) if summaries else None
    files, workers = source.listing.files, workers_for(source.listing.size, source.config.memory)
    with unchanged(files), exchange.scratch_for(directory, workers) as scratch:
        table = open_table(source, scratch, parsed)
        units = table.input.units
        if parsed:
            pieces = [[unit for unit in units if Path(unit.uri).parent == summary] for summary in summaries]
        else:
            number = min(number, len(units))
            pieces = [units[i * len(units) // number : (i + 1) * len(units) // number] for i in range(number)]
        shares, spools = [], []
        for index, mine in enumerate(pieces):
            named = [replace(unit, uri=Path(unit.uri).name) if unit.spooled else unit for unit in mine]
            shares.append(exchange.write(directory / f"shares/{index:05d}", Share(table.scan, named)))
            if not parsed:
                spooled = [Path(unit.uri) for unit in mine if unit.spooled]
                spools.append(exchange.write(directory / f"spools/{index:05d}", files=spooled))
        return OpenedShares(exchange.write(directory / "table", table), shares, spools)


def read_share(directory: Path, spool: Path) -> Share:
    share = exchange.read(directory, Share)
    exchange.verify(spool)
    units = [replace(u, uri=str(exchange.path_in(spool, u.uri))) if u.spooled else u for u in share.units]
    return replace(share, units=units)


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
