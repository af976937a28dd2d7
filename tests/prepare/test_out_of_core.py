"""A table larger than the memory limit of the process is prepared."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.memory import COUNTED, FEWEST_COUNTED, GIB, SAMPLE_ROWS, TEXT_BYTES, MemoryBudget

#: 16 GB of numbers, in a process that may hold 2 GiB of data.
ROWS, COLUMNS, GROUP = 10_000_000, 200, 100_000
LIMIT = 2 << 30
#: The table, its runs and the prepared data.
ON_DISK = 5 * ROWS * COLUMNS * 4

PREPARE = """
import sys
from pathlib import Path
from slipstream.shared.source.config import DataConfig
from slipstream.pipeline.prepare.engine import prepare
prepare(Path(sys.argv[2]), sys.argv[1], "y", DataConfig(id="id"), {})
"""


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for all, which is not kept: pytest would keep those of three runs."""
    if shutil.disk_usage(tmp_path).free < ON_DISK:
        pytest.skip(f"needs {ON_DISK >> 30} GiB of disk")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.prove
def test_a_table_larger_than_memory(roomy: Path) -> None:
    path = roomy / "t.parquet"
    draw = np.random.default_rng(0)
    names = [f"c{index}" for index in range(COLUMNS)]
    schema = pa.schema([("id", pa.int64()), *((name, pa.float64()) for name in names), ("y", pa.int64())])
    numbers = draw.normal(size=(COLUMNS, GROUP))
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, ROWS, GROUP):
            # Drawing new values for every group would take longer than everything else.
            columns = {
                n: np.roll(column, first // GROUP) * draw.normal(1, 0.01)
                for n, column in zip(names, numbers, strict=True)
            }
            y = draw.integers(0, 2, GROUP)
            writer.write_table(pa.table({"id": np.arange(first, first + GROUP), **columns, "y": y}, schema))
    assert ROWS * COLUMNS * 8 > LIMIT, "the table must not fit"
    # The limit is real: the whole table cannot be held.
    hold = f"import numpy; numpy.ones({ROWS * COLUMNS})"
    assert subprocess.run([sys.executable, "-c", hold], preexec_fn=limited, stderr=subprocess.DEVNULL).returncode != 0
    command = [sys.executable, "-c", PREPARE, str(path), str(roomy / "p")]
    subprocess.run(command, preexec_fn=limited, check=True)
    data = PreparedData.open(roomy / "p")
    assert data.card["rows"]["kept"] == ROWS
    train = data.sample("train", 100_000)["numeric"]
    assert abs(train.mean(dtype=np.float64)) < 1e-3 and abs(train.std(dtype=np.float64) - 1) < 1e-2


def test_the_budget_bounds_what_is_held_and_changes_nothing_for_ordinary_tables() -> None:
    ordinary, wide, small = MemoryBudget(1.5), MemoryBudget(1.5), MemoryBudget(0.25)
    assert (ordinary.batch_rows(200), ordinary.sample_rows(200), ordinary.counted(10)) == (15_616, SAMPLE_ROWS, COUNTED)
    assert wide.sample_rows(10_000) * 10_000 * 8 <= 1.5 * GIB / 8
    assert wide.counted(200) * 200 * TEXT_BYTES <= 1.5 * GIB / 4 or wide.counted(200) == FEWEST_COUNTED
    assert small.batch_rows(200) < ordinary.batch_rows(200) and small.batch_rows(10**6) == 256
    assert small.whole_group_bytes == ordinary.whole_group_bytes // 6


PEAK = """
import re, sys
from pathlib import Path
from slipstream.shared.source.config import DataConfig
from slipstream.pipeline.prepare.engine import prepare

def peak():  # getrusage would give that of the process which started this one, if it was larger
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak()
prepare(Path(sys.argv[2]), sys.argv[1], "y", DataConfig(memory=float(sys.argv[3])), {})
print(peak() - before)
"""


@pytest.mark.prove
def test_a_smaller_budget_takes_less_memory(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {f"c{index}": draw.normal(size=20_000) for index in range(1500)}
    pq.write_table(pa.table({**columns, "y": draw.integers(0, 2, 20_000)}), tmp_path / "t.parquet", row_group_size=2000)
    peaks = {}
    for memory in (0.25, 1.5):
        directory = tmp_path / f"p{memory}"
        command = [sys.executable, "-c", PEAK, str(tmp_path / "t.parquet"), str(directory), str(memory)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[memory] = int(output.split()[-1]) << 10
        assert PreparedData.open(directory).card["rows"]["kept"] == 20_000
    assert peaks[0.25] < 0.6 * peaks[1.5], peaks
    assert all(peak < memory * GIB for memory, peak in peaks.items()), peaks
