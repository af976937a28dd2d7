"""Rows of many runs are stored once each, in the order of their keys, for any cuts and merges."""

from pathlib import Path

import numpy as np
import pytest

from slipstream.pipeline.prepare.shuffle import (
    MOST_PARTS,
    RunWriter,
    SortedRun,
    SplitPart,
    enter_segments,
    merge_all,
    order_keys,
    split_parts,
    write_merged_part,
)
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import segment_name
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.distributed.pool import WorkerPool

ROWS, BATCH, BATCHES_OF_A_FILE = 3000, 250, 3
RECORD = np.dtype([("number", "<i4"), ("more", "<f4", (3,))])


def write_runs(scratch: Path, shuffle: bool) -> tuple[list[SortedRun], np.ndarray]:
    """Runs of two splits, even and odd rows; and the keys of all rows."""
    runs: list[SortedRun] = []
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
    monkeypatch.setattr("slipstream.pipeline.prepare.shuffle.BUCKET_BYTES", bucket_bytes)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runs, order = write_runs(scratch, shuffle)
    writer = ArtifactWriter(tmp_path / "artifact")
    for split in (0, 1):
        write_merged_part(writer, f"{split}.rows", runs, RECORD.itemsize, SplitPart(split))
    write_merged_part(writer, "none.rows", runs, RECORD.itemsize, SplitPart(2))
    artifact = writer.finish("test", {}).check()
    for split in (0, 1):
        mine = np.arange(split, ROWS, 2)
        stored = np.fromfile(artifact.path(f"{split}.rows"), RECORD)["number"]
        np.testing.assert_array_equal(stored, mine[np.argsort(order[mine])])
    assert artifact.files["none.rows"].size == 0


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("part_bytes", [700, 4000, 1 << 20])
def test_parts_are_consecutive_ranges_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, part_bytes: int
) -> None:
    monkeypatch.setattr("slipstream.pipeline.prepare.shuffle.PART_BYTES", part_bytes)
    scratch = ResumableScratch(tmp_path / "scratch", WorkerPool(1))
    runs, order = write_runs(scratch.root, shuffle)
    writer = ArtifactWriter(tmp_path / "artifact")
    enter_segments(writer, merge_all(scratch, runs, RECORD.itemsize), number=2)
    artifact = writer.finish("test", {}).check()
    for split, name in enumerate(("train", "validation")):
        mine = np.arange(split, ROWS, 2)
        parts = [
            np.fromfile(artifact.path(file), RECORD)["number"]
            for file in sorted(artifact.files)
            if file.startswith(name)
        ]
        assert (
            len(parts)
            == len(split_parts(split, len(mine), RECORD.itemsize))
            == min(MOST_PARTS, -(-24_000 // part_bytes))
        )
        # Every row once, and the keys ascend from part to part: the parts one after the other are the whole split.
        np.testing.assert_array_equal(np.concatenate(parts), mine[np.argsort(order[mine])])
        assert max(map(len, parts)) < 1.5 * len(mine) / len(parts) + 20
    # Further segments of a split without a row there are none.
    assert sorted(artifact.files)[0] == "train-00002.rows" and not [f for f in artifact.files if f.startswith("test")]


def test_parts_without_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows form a split, and rows keep their order, so its keys lie in the last part."""
    monkeypatch.setattr("slipstream.pipeline.prepare.shuffle.PART_BYTES", 160)
    order, records = order_keys(0, 100, 100, shuffle=False), np.zeros(100, RECORD)
    records["number"] = np.arange(100)
    scratch = ResumableScratch(tmp_path / "scratch", WorkerPool(1))
    with RunWriter(scratch.root / "run-0") as run:
        run.add(0, np.arange(60, 100), order, records)
    writer = ArtifactWriter(tmp_path / "artifact")
    enter_segments(writer, merge_all(scratch, run.runs, RECORD.itemsize), number=0)
    artifact = writer.finish("test", {})
    assert sorted(artifact.files) == [
        "test-00000.rows",
        "train-00000.rows",
        "train-00000_00001.rows",
        "validation-00000.rows",
    ]
    stored = [np.fromfile(artifact.path(segment_name("train", 0, part)), RECORD)["number"] for part in range(2)]
    np.testing.assert_array_equal(np.concatenate(stored), np.arange(60, 100))
    assert artifact.files["test-00000.rows"].size == 0
