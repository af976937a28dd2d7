"""Text parsed by several machines: each parses a share of the files, and the results are judged together.

A file is parsed by one machine however large it is: where its records begin is known only to who reads it from the
beginning. If a column turns out not to be of the type that the first rows suggest, one machine reads all files again,
with this column as text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from tasks.hardware.cpus import usable_cores
from tasks.preprocess.cluster import exchange
from tasks.preprocess.cluster.request import TableRequest
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import find_new_files
from tasks.preprocess.images import holds_images
from tasks.preprocess.pool.workers import WORTH_SPREADING
from tasks.preprocess.read.columnar import LINE, write_spool
from tasks.preprocess.read.files import Listing
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
class TextShare:
    """Files that one machine parses and, once it has, their ``pieces``, whose paths are names of files."""

    plan: TextPlan
    config: DataConfig
    pieces: tuple[TextPiece, ...] = ()

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        return usable_cores() if sum(file.size for file in self.plan.files) > WORTH_SPREADING else 1


def open_texts(request: TableRequest, number: int, directory: Path) -> list[Path]:
    """Cut files of text into at most ``number`` shares, each in a directory in ``directory``. For other data there is
    one directory without a share."""
    data, target, config = request.data, request.target, request.config
    shares: list[TextShare | None] = [None]
    if data.address and not holds_images(data, config):
        target, config = as_table(data, target, config)
        files = data.filled
        if config.earlier:
            with TemporaryDirectory() as scratch:
                _, files, config = find_new_files(data, target, config, Path(scratch))
        if files and one_format(data, config, files) in TEXT_TABLES:
            plan = plan_text(data, files, config)
            shares = [TextShare(piece, config) for piece in cut_plan(plan, number)]
    return [exchange.write(directory / f"{index:05d}", share) for index, share in enumerate(shares)]


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


def parse_share(share: Path, parsed: Path) -> None:
    """Make the files of one share columnar: the pieces in ``parsed``, and what describes them in its summary, with the
    times alone if rows are split by time."""
    mine = exchange.read_optional(share, TextShare)
    if mine is None:
        exchange.write(parsed / exchange.SUMMARY)
        exchange.write(parsed)
        return
    with exchange.scratch_for(parsed, mine.workers) as place:
        pieces = list(place.map(make_columnar, text_jobs(mine.plan, mine.config, place.root)))
        named = tuple(replace(piece, path=Path(piece.path.name)) for piece in pieces)
        column = mine.config.time
        times = [times_of(piece, column) for piece in pieces] if column else []
        exchange.write(parsed / exchange.SUMMARY, replace(mine, pieces=named), times)
        exchange.write(parsed, files=[piece.path for piece in pieces])


def times_of(piece: TextPiece, column: str) -> Path:
    """A spool of the same name that holds one column; the lines alone if the directories give it."""
    path = piece.path.parent / "times" / piece.path.name
    path.parent.mkdir(exist_ok=True)
    batch = pa.ipc.open_file(pa.memory_map(str(piece.path))).get_batch(0)
    write_spool(path, batch.select([column if column in piece.types else LINE]))
    return path


def source_of_shares(data: Listing, summaries: list[Path]) -> Source | None:
    """All shares as one input, whose units lie in the directories ``summaries``; ``None`` if the data is no text, or
    has to be read again. Raises ``UserError`` if there is no row."""
    shares = [(directory, exchange.read_optional(directory, TextShare)) for directory in summaries]
    parsed = [(directory, share) for directory, share in shares if share is not None]
    if not parsed:
        return None
    first = parsed[0][1]
    files = [file for _, share in parsed for file in share.plan.files]
    names = [columns for _, share in parsed for columns in share.plan.names]
    plan = replace(first.plan, files=files, names=names)
    pieces = [
        replace(piece, path=exchange.path_in(directory, piece.path))
        for directory, share in parsed
        for piece in share.pieces
    ]
    return None if replan(pieces, plan, first.config) else check_rows(source_of(pieces, plan), data)
