"""Small tables written to disk and prepared."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.config import DataConfig
from tests.support.tables import Prepare


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """``prepared(text_or_table_or_path, "y", drop=["a"])`` prepares in a fresh directory each time it is called."""
    count = 0

    def run(data: Any, target: str = "y", workers: int = 1, name: str = "t", **settings: Any) -> PreparedData:
        nonlocal count
        count += 1
        if isinstance(data, str | bytes):
            path = tmp_path / f"{name}.csv"
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        elif isinstance(data, pa.Table):
            path = tmp_path / f"{name}.parquet"
            pq.write_table(data, path)
        else:
            path = data
        directory = tmp_path / f"prepared-{count}"
        prepare(directory, str(path), target, DataConfig.from_dict(settings), {}, workers)
        return PreparedData.open(directory)

    return run
