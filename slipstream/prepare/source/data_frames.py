"""A table that lies in memory (a pandas DataFrame, an Arrow table), as a file that everything else can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slipstream.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

ROW_GROUP = 1 << 16


def frame_file(frame: pa.Table | pd.DataFrame, directory: Path) -> str:
    """Write ``frame`` (pandas or Arrow) to a Parquet file in ``directory``, and give its path.

    The file is named by its content, so equal tables are one file, and what is made of it is found again. An index
    becomes a column unless it merely counts the rows. Raises ``UserError`` for a column that mixes types, or whose type
    Parquet does not have.
    """
    table = frame if isinstance(frame, pa.Table) else from_pandas(frame)
    sink = directory / ".frame.partial"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        pq.write_table(table.replace_schema_metadata(None), sink, row_group_size=ROW_GROUP, write_page_checksum=True)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk
        raise UserError(
            f"data: the table cannot be written as Parquet ({' '.join(str(error).split())}); expected columns of "
            "numbers, texts, dates or booleans"
        ) from None
    digest = xxhash.xxh3_128()
    with sink.open("rb") as stream:
        while piece := stream.read(8 << 20):
            digest.update(piece)
    return str(sink.replace(directory / f"frame-{digest.hexdigest()}.parquet"))


def from_pandas(frame: pd.DataFrame) -> pa.Table:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UserError(f"data: is a {type(frame).__name__}; expected an address, a pandas DataFrame or an Arrow table")
    try:
        return pa.Table.from_pandas(frame)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise UserError(
            f"data: the frame cannot be taken as a table ({'; '.join(map(str, error.args))}); expected different names "
            "of columns, and one type in each"
        ) from None
