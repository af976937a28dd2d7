"""A file that is cut during reading is one line of error; no signal ends the process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.fit import scan
from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import LINE, list_units, read_unit
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile, local_file
from slipstream.shared.source.memory import MemoryBudget
from tests.support.wording import refuses

ROWS, BATCH = 60_000, 20_000


def arrow_file(path: Path) -> Path:
    draw = np.random.default_rng(0)
    texts = pa.array(draw.choice(["Oslo", "Rome"], ROWS))
    columns = {f"c{number}": draw.normal(size=ROWS) for number in range(4)}
    table = pa.table({**columns, "t": texts, "v": texts.cast(pa.string_view()), "y": draw.integers(0, 2, ROWS)})
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table, BATCH)
    return path


def read_and_cut(path: Path, budget: MemoryBudget) -> None:
    """Cut the file once the first rows of each unit are read, and read on."""
    whole = path.read_bytes()
    _, units = list_units(local_file(path), "arrow")
    for unit in units:
        batches = read_unit(unit, ["c0", "t", "v", "y"], budget)
        first, _ = next(batches)
        os.truncate(path, 4096)
        first.validate(full=True)
        assert first.column("c0").to_numpy().std() > 0.9
        try:
            assert sum(batch.column("y").to_numpy().sum() for batch, _ in batches) > 0
            print("read")
        except UserError as error:
            print(error.message)
        path.write_bytes(whole)


class Slices(MemoryBudget):
    """A batch fits, and is worked on in slices."""

    def batch_rows(self, columns: int) -> int:
        return 5000


class Small(Slices):
    """A batch does not fit."""

    whole_group_bytes = 1000


def test_lines_of_a_spool_are_those_of_the_users_file_however_it_is_read(tmp_path: Path) -> None:
    path, lines = tmp_path / "spool.arrow", np.arange(ROWS) * 3 + 2
    table = pa.table({"c0": np.arange(ROWS), LINE: lines})
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table)
    _, units = list_units(local_file(path), "arrow")
    for budget in (Slices(0.25), Small(0.25)):
        assert np.concatenate([found for _, found in read_unit(units[0], ["c0"], budget)]).tolist() == lines.tolist()


def test_a_cut_arrow_file_does_not_end_the_process(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "t.arrow")
    code = f"for budget in (Slices, Small): read_and_cut(Path({str(path)!r}), budget(0.25))"
    program = f"from tests.prepare.test_cut_files import *\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    # A batch that fits was read whole before the cut, the slices of another one are not there any more.
    refused = f"{path}: not a complete Arrow file: it is truncated or damaged (expected {path.stat().st_size:,} bytes)"
    assert done.stdout.splitlines() == ["read"] * 3 + [refused] * 3


def test_an_arrow_file_that_is_cut_between_two_batches_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = arrow_file(tmp_path / "t.arrow"), []

    def cut(batch: pa.RecordBatch, *rest: Any) -> object:
        seen.append(batch.num_rows)
        if len(seen) == 2:
            os.truncate(path, 4096)
        return judged(batch, *rest)

    judged = scan.judge_rows
    monkeypatch.setattr(scan, "judge_rows", cut)
    with refuses(UserError, match=r"t\.arrow:"):
        prepare(tmp_path / "p", str(path), "y", DataConfig(), {}, workers=1)
    assert len(seen) == 2 and not (tmp_path / "p" / "manifest.json").exists()


def test_large_batches_are_read_slice_by_slice_to_the_same_values(tmp_path: Path) -> None:
    _, units = list_units(SourceFile(str(arrow_file(tmp_path / "t.arrow")), 0), "arrow")
    names = ["c3", "v", "t", "y"]
    for unit in units:
        small, large = (list(read_unit(unit, names, kind(0.25))) for kind in (Small, Slices))
        assert len(small) == len(large) == BATCH // 5000
        for (batch, lines), (other, of_other) in zip(small, large, strict=True):
            assert batch.equals(other) and (lines == of_other).all()
