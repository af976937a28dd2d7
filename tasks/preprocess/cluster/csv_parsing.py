"""Text parsed by several machines: each parses some of the files, and what they found is judged together.

A file is parsed by one machine however large it is, since only who reads it from its beginning knows where its records
begin. If a column turns out not to be what the first rows promised, all is read again by one machine, as text there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from tasks.hardware.cpus import usable_cores
from tasks.preprocess.cluster.exchange import SAID, beside, hand_over, take_over
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import find_new_files
from tasks.preprocess.images import hold_images
from tasks.preprocess.pool.workers import WORTH_SPREADING
from tasks.preprocess.read.columnar import LINE, write_spool
from tasks.preprocess.read.files import find_files
from tasks.preprocess.read.tables import (
    TEXT_TABLES,
    Source,
    TextPiece,
    TextPlan,
    check_rows,
    make_columnar,
    one_format,
    plan_text,
    replan,
    source_of,
    text_jobs,
)
from tasks.preprocess.read.text_folders import as_table


@dataclass(frozen=True)
class TextLot:
    """Files that one machine parses, and once it has, their ``pieces``, whose paths are names."""

    plan: TextPlan
    config: DataConfig
    pieces: tuple[TextPiece, ...] = ()

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        return usable_cores() if sum(file.size for file in self.plan.files) > WORTH_SPREADING else 1


def open_texts(
    data: str, target: str, config: DataConfig, number: int, directory_of: Callable[[int], Path]
) -> list[Path]:
    """Cut files of text into at most ``number`` lots, in ``directory_of(0)`` and so on. Other data is one empty lot."""
    lots: list[TextLot | None] = [None]
    if data and not hold_images(data, config):
        target, config = as_table(data, target, config)
        files = [file for file in find_files(data) if file.size]
        if config.earlier:
            with TemporaryDirectory() as scratch:
                _, files, config = find_new_files(data, target, config, Path(scratch))
        if files and one_format(data, config, files) in TEXT_TABLES:
            plan = plan_text(data, files, config)
            lots = [TextLot(piece, config) for piece in cut_plan(plan, number)]
    for index, lot in enumerate(lots):
        hand_over(directory_of(index), lot)
    return [directory_of(index) for index in range(len(lots))]


def cut_plan(plan: TextPlan, number: int) -> list[TextPlan]:
    """At most ``number`` plans for consecutive files, of about the same size if no file is too large for that."""
    sizes = [file.size for file in plan.files]
    total = sum(sizes)
    # A file belongs where its middle lies.
    places = [(2 * end - size) * number // (2 * total) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    cut = []
    for _, indices in groupby(range(len(sizes)), lambda index: places[index]):
        mine = list(indices)
        cut.append(replace(plan, files=[plan.files[i] for i in mine], names=[plan.names[i] for i in mine]))
    return cut


def parse_lot(lot: Path, parsed: Path) -> None:
    """Make the files of one lot columnar. What is said of the pieces is in a directory of its own in ``parsed``, and
    with it, if rows are split by time, the times alone."""
    mine: TextLot | None = take_over(lot)
    if mine is None:
        hand_over(parsed / SAID, None)
        hand_over(parsed, None)
        return
    with beside(parsed, mine.workers) as place:
        pieces = list(place.map(make_columnar, text_jobs(mine.plan, mine.config, place.root)))
        named = tuple(replace(piece, path=Path(piece.path.name)) for piece in pieces)
        column = mine.config.time
        times = [times_of(piece, column) for piece in pieces] if column else []
        hand_over(parsed / SAID, replace(mine, pieces=named), times)
        hand_over(parsed, None, [piece.path for piece in pieces])


def times_of(piece: TextPiece, column: str) -> Path:
    """A spool of the same name that holds one column; the lines alone if the directories give it."""
    path = piece.path.parent / "times" / piece.path.name
    path.parent.mkdir(exist_ok=True)
    batch = pa.ipc.open_file(pa.memory_map(str(piece.path))).get_batch(0)
    write_spool(path, batch.select([column if column in piece.types else LINE]))
    return path


def source_of_lots(data: str, said: list[Path]) -> Source | None:
    """What was parsed as one input, whose units lie in the directories ``said``; ``None`` if the data is no text, or
    has to be read again. Raises ``UserError`` if there is no row."""
    lots: list[TextLot | None] = [take_over(directory) for directory in said]
    parsed = [lot for lot in lots if lot is not None]
    if not parsed:
        return None
    files, names = [[one for lot in parsed for one in getattr(lot.plan, part)] for part in ("files", "names")]
    plan = replace(parsed[0].plan, files=files, names=names)
    pieces = [
        replace(piece, path=directory / piece.path)
        for directory, lot in zip(said, parsed, strict=True)
        for piece in lot.pieces
    ]
    return None if replan(pieces, plan, parsed[0].config) else check_rows(source_of(pieces, plan), data)
