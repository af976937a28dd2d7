"""Preparation of one table on several machines: each runs the usual functions on a share of the units.

parse (each share of text files) → open → scan (each share) → fit → encode (each share) → merge (each partition,
:mod:`slipstream.pipeline.prepare.sharded.merge_partitions`) → assemble. The steps exchange the artifacts of
:mod:`slipstream.shared.artifacts.exchange`. Partial results are kept per unit and merged in unit order, so the bytes
equal those of one machine for any number of shares.

Parquet and Arrow are read in place. Text is first converted to Arrow; a share's Arrow files are its *spool*. One
machine parses a whole text file, as records can be found only from the start. If a column does not have the type that
its first rows suggest, one machine reads all files again with that column as text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from slipstream.pipeline.prepare.fit.scan_result import ScanResult, UnitScan
from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.pipeline.prepare.sharded.merge_partitions import MergePlan, write_partitions
from slipstream.pipeline.prepare.sharded.quarantine_spools import (
    find_spools,
    link_spools,
    read_opened,
    write_fitted,
    write_opened,
)
from slipstream.pipeline.prepare.table import encode_units, fit_table, open_table, scan_units
from slipstream.shared.artifacts import exchange
from slipstream.shared.distributed.pool import workers_for
from slipstream.shared.source.columnar import LINE, TableInput, Unit, write_spool
from slipstream.shared.source.files import SourceFile, files_unchanged
from slipstream.shared.source.text.text_tables import (
    ConvertedBlock,
    TextPlan,
    make_columnar,
    plan_text,
    revise_plan,
    text_jobs,
    text_table_input,
)

#: Approximate memory of one value in bytes.
CELL_BYTES = 8


# Text: each machine parses a share of the files


@dataclass(frozen=True)
class TextShare:
    """Text files that one machine parses.

    Once parsed, ``pieces`` are their blocks; the paths are bare file names in the share's directory.
    """

    plan: TextPlan
    pieces: tuple[ConvertedBlock, ...] = ()

    @property
    def workers(self) -> int:
        return workers_for(sum(file.size for file in self.plan.files), self.plan.config.memory)


def open_texts(source: SourceToPrepare, number: int, directory: Path) -> list[Path]:
    """Divide text files into at most ``number`` shares, each in a subdirectory of ``directory``."""
    with files_unchanged(source.files):
        plans = cut_plan(plan_text(source), number)
    return [exchange.write_part(directory / f"{index:05d}", TextShare(plan)) for index, plan in enumerate(plans)]


def cut_plan(plan: TextPlan, number: int) -> list[TextPlan]:
    """Return at most ``number`` plans for consecutive files, of similar total size if the files allow it."""
    sizes = [file.size for file in plan.files]
    total = sum(sizes)
    # A file belongs to the share that contains its middle.
    shares = [(2 * end - size) * number // (2 * total) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    plans = []
    for _, indices in groupby(range(len(sizes)), lambda index: shares[index]):
        mine = list(indices)
        plans.append(replace(plan, files=[plan.files[i] for i in mine], names=[plan.names[i] for i in mine]))
    return plans


def parse_share(share: Path, parsed: Path) -> None:
    """Convert the text files of one share to Arrow files in ``parsed``; describe them in its summary.

    For a split by time, the summary includes the times.
    """
    mine = exchange.read_part(share, TextShare)
    with files_unchanged(mine.plan.files), exchange.scratch_for(parsed, mine.workers) as scratch:
        pieces = list(scratch.map(make_columnar, text_jobs(mine.plan, scratch.root)))
        summary, column = parsed / exchange.SUMMARY, mine.plan.config.time
        named = tuple(
            replace(piece, path=Path(piece.path.name), bad=link_spools(piece.bad, summary, piece.path.stem))
            for piece in pieces
        )
        times = [times_of(piece, column) for piece in pieces] if column else []
        exchange.write_part(summary, replace(mine, pieces=named), times)
        exchange.write_part(parsed, files=[piece.path for piece in pieces])


def times_of(piece: ConvertedBlock, column: str) -> Path:
    """Write the column of times, or the line numbers if directories give the times, to a file in ``times``."""
    path = piece.path.parent / "times" / piece.path.name
    path.parent.mkdir(exist_ok=True)
    # Mapping is safe: this process has just written the file, and no other knows it.
    batch = pa.ipc.open_file(pa.memory_map(str(piece.path))).get_batch(0)
    write_spool(path, batch.select([column if column in batch.schema.names else LINE]))
    return path


def input_of_shares(summaries: list[Path]) -> TableInput | None:
    """Return all parsed shares as one table, or None if a column must be read again as text.

    Units get paths in the directory of their share's summary, where the files need not exist.
    """
    parsed = [(directory, exchange.read_part(directory, TextShare)) for directory in summaries]
    files = [file for _, share in parsed for file in share.plan.files]
    names = [columns for _, share in parsed for columns in share.plan.names]
    plan = replace(parsed[0][1].plan, files=files, names=names)
    pieces = [
        replace(piece, path=exchange.path_in(directory, piece.path), bad=find_spools(piece.bad, directory))
        for directory, share in parsed
        for piece in share.pieces
    ]
    return None if revise_plan(pieces, plan) else text_table_input(pieces, plan)


# All tables: each machine scans and encodes a share of the units


@dataclass(frozen=True)
class Share:
    """Units that one machine scans and encodes; the ``uri`` of a unit from text is a file name in the share's spool."""

    scan: UnitScan
    units: list[Unit]

    @property
    def files(self) -> list[SourceFile]:
        """Raw files to read; empty for text, which is read from the spool."""
        return list(dict.fromkeys(unit.source for unit in self.units if not unit.spooled))

    @property
    def workers(self) -> int:
        cells = sum(unit.rows for unit in self.units) * len(self.scan.types)
        return workers_for(CELL_BYTES * cells, self.scan.config.memory)


@dataclass(frozen=True)
class ScannedShare:
    """Results of the first pass, one per unit of a share."""

    units: list[ScanResult]


class OpenedShares(NamedTuple):
    """Directories of an opened table and of its shares.

    ``spools`` hold the shares' parsed rows; empty if :func:`parse_share` has already written them.
    """

    table: Path
    shares: list[Path]
    spools: list[Path]


def open_shares(source: SourceToPrepare, number: int, summaries: list[Path], directory: Path) -> OpenedShares:
    """Open the table and divide it into at most ``number`` shares in ``directory``.

    Already parsed text, described by ``summaries``, keeps its shares.
    """
    parsed = input_of_shares(summaries) if summaries else None
    files = source.listing.files
    workers = 1 if parsed else workers_for(source.size, source.config.memory)
    with files_unchanged(files), exchange.scratch_for(directory, workers) as scratch:
        table = open_table(source, scratch, parsed)
        units = table.input.units
        if parsed:
            pieces = [[unit for unit in units if Path(unit.uri).parent == summary] for summary in summaries]
            spools = []
        else:
            number = min(number, len(units))
            pieces = [units[i * len(units) // number : (i + 1) * len(units) // number] for i in range(number)]
            spools = [
                exchange.write_part(directory / f"spools/{index:05d}", files=[Path(u.uri) for u in mine if u.spooled])
                for index, mine in enumerate(pieces)
            ]
        shares = [
            exchange.write_part(
                directory / f"shares/{index:05d}", Share(table.scan, [u.moved(file_name) for u in mine])
            )
            for index, mine in enumerate(pieces)
        ]
        return OpenedShares(write_opened(directory / "table", table), shares, spools)


def file_name(uri: str) -> str:
    return Path(uri).name


def read_share(directory: Path, spool: Path) -> Share:
    share = exchange.read_part(directory, Share)
    exchange.verify_part(spool)
    return replace(share, units=[unit.moved(lambda name: str(exchange.path_in(spool, name))) for unit in share.units])


def scan_share(share: Path, spool: Path, scanned: Path) -> None:
    """Run the first pass over one share."""
    mine = read_share(share, spool)
    with files_unchanged(mine.files), exchange.scratch_for(scanned, mine.workers) as scratch:
        units = [
            replace(unit, bad=link_spools(unit.bad, scanned, f"scanned-{number:06d}"))
            for number, unit in enumerate(scan_units(scratch, mine.scan, mine.units))
        ]
        exchange.write_part(scanned, ScannedShare(units))


def read_scanned(directory: Path) -> list[ScanResult]:
    units = exchange.read_part(directory, ScannedShare).units
    return [replace(unit, bad=find_spools(unit.bad, directory)) for unit in units]


def fit_shares(table: Path, scanned: list[Path], number: int, fitted: Path, plan: Path) -> int:
    """Fit on the results of all shares and plan the merge; return the number of partitions (at most ``number``)."""
    fitting = fit_table(read_opened(table), (unit for share in scanned for unit in read_scanned(share)))
    planned = MergePlan.of(fitting, number)
    write_fitted(fitted, fitting)
    exchange.write_part(plan, planned)
    return len(planned.partitions)


def encode_share(share: Path, spool: Path, scanned: Path, plan: Path, encoded: Path) -> None:
    """Run the second pass over one share, and write it by partition."""
    mine = read_share(share, spool)
    planned = exchange.read_part(plan, MergePlan)
    rejected = [rows for unit in exchange.read_part(scanned, ScannedShare).units for rows in unit.rejected]
    with files_unchanged(mine.files), exchange.scratch_for(encoded, mine.workers) as scratch:
        units = list(encode_units(scratch, mine.scan, planned.transform, mine.units, rejected))
        write_partitions(scratch, planned, [run for unit in units for run in unit.runs], encoded)
    exchange.write_part(encoded)
