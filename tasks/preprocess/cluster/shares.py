"""One table prepared by several machines: the same functions as on one, each over a share of the units.

parse (each lot of text, :mod:`tasks.preprocess.cluster.csv_parsing`) → open → scan (each share) → fit → encode (each
share) → merge (each partition, :mod:`tasks.preprocess.cluster.merge_partitions`) → assemble. The steps exchange the
artifacts of :mod:`tasks.preprocess.cluster.exchange`. Partial results are passed on per unit, not aggregated, and are
merged in the order of the units: so the bytes are those of one machine, whatever the number of shares.

Parquet and Arrow are read where they lie, by whoever has the share. Text is first made columnar, and of that each share
has its *spool*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.hardware.cpus import usable_cores
from tasks.preprocess.cluster.csv_parsing import source_of_lots
from tasks.preprocess.cluster.exchange import beside, hand_over, take_over
from tasks.preprocess.cluster.merge_partitions import Plan, hand_over_lots, name_of
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import Encoding, Opened, encode_units, fit_table, open_new_files, open_table, survey_units
from tasks.preprocess.fit.scan import Found, Survey
from tasks.preprocess.images import hold_images
from tasks.preprocess.incremental import Earlier
from tasks.preprocess.pool.workers import WORTH_SPREADING, workers_for
from tasks.preprocess.read.columnar import Unit
from tasks.preprocess.read.files import Listing

#: What a value takes in memory, about.
CELL_BYTES = 8


@dataclass(frozen=True)
class Share:
    """Units that one machine surveys and then encodes. ``uri`` of those that were text is a name in their spool."""

    survey: Survey | None
    units: list[Unit]

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        cells = sum(unit.rows for unit in self.units) * len(self.survey.types if self.survey else ())
        return usable_cores() if CELL_BYTES * cells > WORTH_SPREADING else 1


def open_shares(
    data: Listing,
    target: str,
    config: DataConfig,
    source: str,
    number: int,
    said: list[Path],
    opened: Path,
    share_of: Callable[[int], Path],
    spool_of: Callable[[int], Path],
) -> tuple[list[Path], list[Path]]:
    """Open the table into ``opened`` and cut it into at most ``number`` shares, in ``share_of(0)`` and so on, with the
    spool of each in ``spool_of(0)`` and so on. For text that was parsed in lots, of which that was ``said``, the lots
    are the shares, and there are no other spools.

    Images, and an earlier set to which there is nothing new, are left to one machine: one share, without units.
    """
    if not data.address or hold_images(data, config):
        return leave_to_one(opened, share_of(0), spool_of(0))
    parsed = source_of_lots(data, said)
    with beside(opened, workers_for(data.size)) as place:
        if config.earlier:
            table = open_new_files(place, data, target, config, parsed)
            if isinstance(table, Earlier):
                return leave_to_one(opened, share_of(0), spool_of(0))
        else:
            table = open_table(place, data, target, config, source, parsed)
        hand_over(opened, table)
        units = table.source.units
        if parsed:
            pieces = [[unit for unit in units if Path(unit.uri).parent == directory] for directory in said]
        else:
            number = min(number, len(units))
            pieces = [units[i * len(units) // number : (i + 1) * len(units) // number] for i in range(number)]
        shares, spools = [], []
        for index, mine in enumerate(pieces):
            named = [unit if unit.uri == unit.file else replace(unit, uri=Path(unit.uri).name) for unit in mine]
            shares.append(hand_over(share_of(index), Share(table.survey, named)).directory)
            if not parsed:
                spooled = [Path(unit.uri) for unit in mine if unit.uri != unit.file]
                spools.append(hand_over(spool_of(index), None, spooled).directory)
    return shares, spools


def leave_to_one(opened: Path, share: Path, spool: Path) -> tuple[list[Path], list[Path]]:
    hand_over(opened, None)
    return [hand_over(share, Share(None, [])).directory], [hand_over(spool, None).directory]


def take_share(directory: Path, spool: Path) -> Share:
    share: Share = take_over(directory)
    take_over(spool)
    found = [u if u.uri == u.file else replace(u, uri=str(spool / u.uri)) for u in share.units]
    return replace(share, units=found)


def survey_share(share: Path, spool: Path, surveyed: Path) -> None:
    """The first pass over one share."""
    mine = take_share(share, spool)
    with beside(surveyed, mine.workers) as place:
        hand_over(surveyed, list(survey_units(place, mine.survey, mine.units)) if mine.survey else [])


def fit_shares(opened: Path, surveyed: list[Path], number: int, fitted: Path, plan: Path) -> int:
    """What all shares found, in ``fitted``, and the ``plan`` of what is left to do, in at most ``number`` lots; how
    many they are."""
    table: Opened | None = take_over(opened)
    fitting = table and fit_table(table, (part for directory in surveyed for part in take_over(directory)))
    hand_over(fitted, fitting)
    planned = Plan.of(fitting, number) if fitting else None
    hand_over(plan, planned)
    return len(planned.lots) if planned else 1


def encode_share(share: Path, spool: Path, surveyed: Path, plan: Path, encoded: Path) -> None:
    """The second pass over one share, handed on lot by lot."""
    mine = take_share(share, spool)
    planned: Plan | None = take_over(plan)
    if mine.survey is None or planned is None:
        hand_over(encoded / name_of(0), [])
    else:
        found: list[Found] = take_over(surveyed)
        rejected = [rows for unit in found for rows in unit.rejected]
        with beside(encoded, mine.workers) as place:
            encoding = Encoding(mine.survey, planned.transform, place.root)
            done = list(encode_units(place, encoding, mine.units, rejected))
            hand_over_lots(place, planned, [run for unit in done for run in unit.runs], encoded)
    hand_over(encoded, None)
