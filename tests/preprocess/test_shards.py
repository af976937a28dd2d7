"""Rows of many runs are stored once each, in the order of their keys, however little is merged at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tasks.artifact import ArtifactWriter
from tasks.preprocess import shards
from tasks.preprocess.shards import RunWriter, merge, order_keys

ROWS, BATCH, BATCHES_OF_A_FILE = 3000, 250, 3
RECORD = np.dtype([("number", "<i4"), ("more", "<f4", (3,))])


def write_runs(scratch: Path, shuffle: bool) -> tuple[list[shards.Run], np.ndarray]:
    """Runs of two splits, even and odd rows; and the keys of all rows."""
    runs: list[shards.Run] = []
    order = order_keys(0, ROWS, ROWS, shuffle)
    for first in range(0, ROWS, BATCH * BATCHES_OF_A_FILE):
        with RunWriter(scratch / f"run-{first}") as writer:
            for start in range(first, first + BATCH * BATCHES_OF_A_FILE, BATCH):
                records = np.zeros(BATCH, RECORD)
                records["number"] = np.arange(start, start + BATCH)
                for split in (0, 1):
                    writer.add(split, np.arange(split, BATCH, 2), order[start : start + BATCH], records)
        runs += writer.runs
    return runs, order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_rows_are_stored_in_the_order_of_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, bucket_bytes: int
) -> None:
    monkeypatch.setattr(shards, "BUCKET_BYTES", bucket_bytes)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runs, order = write_runs(scratch, shuffle)
    writer = ArtifactWriter(tmp_path / "artifact")
    for split in (0, 1):
        merge(writer, f"{split}.rows", [run for run in runs if run.split == split], RECORD.itemsize)
    merge(writer, "none.rows", [], RECORD.itemsize)
    artifact = writer.finish("test", {}).check()
    for split in (0, 1):
        mine = np.arange(split, ROWS, 2)
        stored = np.fromfile(artifact.path(f"{split}.rows"), RECORD)["number"]
        np.testing.assert_array_equal(stored, mine[np.argsort(order[mine])])
    assert artifact.files["none.rows"].size == 0
