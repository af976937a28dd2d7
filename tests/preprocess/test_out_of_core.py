"""A table larger than the memory that a process may have is prepared all the same."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.preprocess.prepared import PreparedData

ROWS, COLUMNS, GROUP = 1_000_000, 150, 50_000
LIMIT = 1 << 30

PREPARE = """
import sys
from pathlib import Path
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
prepare(Path(sys.argv[2]), sys.argv[1], "y", DataConfig(id="id"), {})
"""


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


@pytest.mark.prove
def test_a_table_larger_than_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    draw = np.random.default_rng(0)
    names = [f"c{place}" for place in range(COLUMNS)]
    with pq.ParquetWriter(
        path, pa.schema([("id", pa.int64()), *((n, pa.float64()) for n in names), ("y", pa.int64())])
    ) as w:
        for first in range(0, ROWS, GROUP):
            columns = {name: draw.normal(size=GROUP) for name in names}
            w.write_table(pa.table({"id": np.arange(first, first + GROUP), **columns, "y": draw.integers(0, 2, GROUP)}))
    assert ROWS * COLUMNS * 8 > LIMIT, "the table must not fit"
    # The limit is real: the whole table cannot be held.
    hold = f"import numpy; numpy.ones({ROWS * COLUMNS})"
    assert subprocess.run([sys.executable, "-c", hold], preexec_fn=limited, stderr=subprocess.DEVNULL).returncode != 0
    command = [sys.executable, "-c", PREPARE, str(path), str(tmp_path / "p")]
    subprocess.run(command, preexec_fn=limited, check=True)
    data = PreparedData.open(tmp_path / "p")
    assert data.card["rows"]["kept"] == ROWS
    train = data.split("train")["numeric"][:100_000]
    assert abs(train.mean(dtype=np.float64)) < 1e-3 and abs(train.std(dtype=np.float64) - 1) < 1e-2
