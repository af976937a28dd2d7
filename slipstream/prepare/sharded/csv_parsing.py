"""Text parsed by several machines: each parses a share of the files, and the results are judged together.

A file is parsed by one machine however large it is: where its records begin is known only to who reads it from the
beginning. If a column turns out not to be of the type that the first rows suggest, one machine reads all files again,
with this column as text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import pyarrow as pa

from slipstream.prepare.resolve import ResolvedSource
from slipstream.prepare.sharded import exchange
from slipstream.prepare.source.columnar import LINE, TableInput, write_spool
from slipstream.prepare.source.files import unchanged
from slipstream.prepare.source.text_tables import (
    TextPiece,
    TextPlan,
    input_of,
    make_columnar,
    plan_text,
    replan,
    text_jobs,
)
from slipstream.prepare.workers.pool import workers_for


@dataclass(frozen=True)
class TextShare:
    """Files that one machine parses and, once it has, their ``pieces``, whose paths are names of files."""

    plan: TextPlan
    pieces: tuple[TextPiece, ...] = ()

    @property
    def workers(self) -> int:
        """The processes that are worth starting for it."""
        return workers_for(sum(file.size for file in self.plan.files), self.plan.config.memory)


def open_texts(source: ResolvedSource, number: int, directory: Path) -> list[Path]:
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
