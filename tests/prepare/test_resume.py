"""A killed preparation resumes and gives the result of an uninterrupted one."""

import functools
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare import engine, shuffle
from slipstream.pipeline.prepare.fit.scan import scan_unit
from slipstream.pipeline.prepare.shuffle import merge_part
from slipstream.pipeline.prepare.table import encode_unit
from slipstream.shared.artifacts import typed_values
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.resume import RECORD, ResumableScratch, UnitOfWork, resumable_scratch, run_or_restore
from slipstream.shared.distributed.pool import WorkerPool
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.text.text_tables import make_columnar
from tests.support.proving import first_few
from tests.support.wording import refuses, same_wording

GROUPS, ROWS = 12, 250
#: The training rows are merged in three parts, the others in one each.
PART_BYTES, PARTS = 9000, 5

#: Prepares, and kills itself or the process that it works for when a function is called for the nth time.
KILLED = """
import functools, os, signal, sys, time
from pathlib import Path
from slipstream.shared.source.text import text_tables
from slipstream.pipeline.prepare import shuffle, table
from slipstream.pipeline.prepare.fit import scan
from slipstream.pipeline.prepare import engine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.distributed.pool import WorkerPool

data, directory, scratch, workers, where, times, victim = sys.argv[1:]
module, name = where.split(".")
owner = {
    "engine": engine,
    "table": table,
    "tables": text_tables,
    "merge": shuffle,
    "scan": scan,
    "writer": shuffle.RunWriter,
}[module]
original, calls = getattr(owner, name), 0

@functools.wraps(original)
def faulty(*arguments):
    global calls
    calls += 1
    if calls == int(times):
        if name == "write_merged_part":  # half of the file is there
            Path(arguments[0].directory, arguments[1]).write_bytes(b"half")
        Path(directory + ".victim").write_text(str(os.getpid()))
        os.kill(os.getppid() if victim == "parent" else os.getpid(), signal.SIGKILL)
        time.sleep(30)
    return original(*arguments)

setattr(owner, name, faulty)
shuffle.PART_BYTES = 9000
if __name__ == "__main__":
    # The workers do not import this script by themselves.
    engine.WorkerPool = lambda count, _: WorkerPool(count, "killed")
    engine.prepare(Path(directory), data, "y", DataConfig(), {}, int(workers), Path(scratch))
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "PART_BYTES", PART_BYTES)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    rows = GROUPS * ROWS
    table = pa.table(
        {"x": draw.normal(size=rows), "c": draw.choice(list("abcd"), rows), "y": draw.integers(0, 2, rows)}
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=ROWS)
    return tmp_path / "t.parquet"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Several files, because a small file is one unit of work."""
    draw = np.random.default_rng(1)
    (tmp_path / "texts").mkdir()
    for number in range(5):
        lines = [f"{x:.4f},{'ab'[int(x > 0)]}\n" for x in draw.normal(size=ROWS)]
        (tmp_path / f"texts/{number}.csv").write_text("x,y\n" + "".join(lines))
    return tmp_path / "texts"


def killed(data: Path, tmp_path: Path, where: str, times: int) -> Path:
    """A prepare of ``data`` dies at the ``times``-th call of ``where``; what it had finished by then."""
    scratch = tmp_path / "scratch"
    command: list[str | Path] = [
        sys.executable,
        "-c",
        KILLED,
        data,
        tmp_path / "first",
        scratch,
        "1",
        where,
        str(times),
        "self",
    ]
    assert subprocess.run(command).returncode == -signal.SIGKILL, "it was not killed"
    return scratch


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the units of work that are done from now on in this process."""
    done: Counter[str] = Counter()
    callers = {
        make_columnar: "shared.source.text.text_tables",
        scan_unit: "pipeline.prepare.table",
        encode_unit: "pipeline.prepare.table",
        merge_part: "pipeline.prepare.shuffle",
    }
    for work, module in callers.items():
        monkeypatch.setattr(f"slipstream.{module}.{work.__name__}", counting(work, done))
    return done


def counting(work: Any, done: Counter[str]) -> Any:
    @functools.wraps(work)
    def run(job: object) -> object:
        done[work.__name__] += 1
        return work(job)

    return run


def prepare(directory: Path, data: Path, workers: int = 1, scratch: Path | None = None) -> Artifact:
    return engine.prepare(directory, str(data), "y", DataConfig(), {}, workers, scratch)


@pytest.mark.parametrize(
    ("where", "times", "left"),
    first_few(
        [
            ("table.scan_unit", 8, {"scan_unit": GROUPS - 7, "encode_unit": GROUPS, "merge_part": PARTS}),
            (
                "writer.add",
                13,
                {"encode_unit": GROUPS - 4, "merge_part": PARTS},
            ),  # within the fifth unit, of three splits each
            ("merge.write_merged_part", 2, {"merge_part": PARTS - 1}),
        ]
    ),
)
def test_what_was_done_is_not_done_again(
    parquet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    times: int,
    left: dict[str, int],
) -> None:
    scratch = killed(parquet, tmp_path, where, times)
    2 * GROUPS + PARTS
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", parquet, scratch=scratch)
    assert dict(done) == left
    same_wording(capsys.readouterr().err)
    assert not scratch.exists() and not (tmp_path / "first/manifest.json").exists()
    assert again.check_sha256().fingerprint == prepare(tmp_path / "whole", parquet).fingerprint


@pytest.mark.prove
def test_text_goes_on_too(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = killed(texts, tmp_path, "tables.make_columnar", 4)
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", texts, scratch=scratch)
    assert done == {"make_columnar": 2, "scan_unit": 5, "encode_unit": 5, "merge_part": 3}
    assert again.fingerprint == prepare(tmp_path / "whole", texts).fingerprint


def with_workers(data: Path, tmp_path: Path, victim: str) -> subprocess.CompletedProcess[str]:
    """Prepare with two workers; one kills itself or its parent in its third unit."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command: list[str | Path] = [
        sys.executable,
        script,
        data,
        tmp_path / "first",
        tmp_path / "scratch",
        "2",
        "scan.split_rows",
        "3",
        victim,
    ]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)


def test_a_lost_worker_costs_its_unit_alone(parquet: Path, tmp_path: Path) -> None:
    lost = with_workers(parquet, tmp_path, "self")
    assert lost.returncode == 1 and "a worker process was killed" in lost.stderr
    assert 2 <= len(list((tmp_path / "scratch").glob(f"scan_unit*{RECORD}"))) < GROUPS
    again = prepare(tmp_path / "again", parquet, 2, tmp_path / "scratch")
    assert again.fingerprint == prepare(tmp_path / "whole", parquet).fingerprint


@pytest.mark.prove
def test_a_killed_process_takes_its_workers_along(parquet: Path, tmp_path: Path) -> None:
    """An orphan would write the file of a unit at the same time as the worker of the next attempt."""
    assert with_workers(parquet, tmp_path, "parent").returncode == -signal.SIGKILL
    orphan = Path(f"/proc/{(tmp_path / 'first.victim').read_text()}/stat")
    deadline = time.monotonic() + 20
    # No process may reap it: a zombie is dead, too.
    while orphan.exists() and orphan.read_text().split(") ")[1][0] != "Z":
        assert time.monotonic() < deadline, "the worker outlived the process that started it"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        pytest.param(how, what, marks=[] if first == second == 0 else pytest.mark.prove)
        for first, how in enumerate(("cut", "flipped", "gone"))
        for second, what in enumerate(("scan_unit-0-000003.done", "encode_unit-0-000003.done", "run-000000000750.rows"))
    ],
)
def test_what_is_not_whole_is_done_again(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    scratch = killed(parquet, tmp_path, "engine.merge_all", 1)
    raw = bytearray((scratch / what).read_bytes())
    raw[len(raw) // 2] ^= 16
    if how == "gone":
        (scratch / what).unlink()
    else:
        (scratch / what).write_bytes(raw[: len(raw) // 2] if how == "cut" else raw)
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", parquet, scratch=scratch)
    assert done == {"scan_unit" if "scan" in what else "encode_unit": 1, "merge_part": PARTS}
    assert again.fingerprint == prepare(tmp_path / "whole", parquet).fingerprint


@pytest.mark.prove
def test_a_damaged_part_is_merged_again(parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = killed(parquet, tmp_path, "merge.write_merged_part", 3)
    merged = scratch / "train-1" / "train-1.rows"
    raw = bytearray(merged.read_bytes())
    raw[77] ^= 1
    merged.write_bytes(raw)
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", parquet, scratch=scratch)
    assert done == {"merge_part": PARTS - 1}
    assert again.fingerprint == prepare(tmp_path / "whole", parquet).fingerprint


def test_what_must_be_mended_leaves_no_scratch(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, float("inf")] * 200, "y": [0, 1] * 200})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="infinite"):
        prepare(tmp_path / "p", tmp_path / "t.parquet", scratch=tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()


def square(job: int) -> int:
    return job * job


def test_results_come_in_the_order_of_the_jobs_whoever_did_them(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    run_or_restore(UnitOfWork(tmp_path / "w", "square-0-000002", square, 2))
    scratch = ResumableScratch(tmp_path / "w", WorkerPool(1))
    assert list(scratch.map(square, range(5))) == [0, 1, 4, 9, 16] and scratch.done_before == 1
    # The jobs are told apart by their place alone, and by which time it is that the function is mapped.
    later = ResumableScratch(tmp_path / "w", WorkerPool(1))
    assert list(later.map(square, [9] * 5)) == [0, 1, 4, 9, 16]
    assert list(later.map(square, [9] * 5)) == [81] * 5


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_record_of_something_else_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    forged = {
        "pickle": pickle.dumps(Payload(f"touch {tmp_path / 'ran'}")),
        "other type": typed_values.encode_value(("four", {}), tuple[str, dict[str, str]]),
        "other fields": typed_values.encode_value({"result": 4}, dict[str, int]),
    }
    pickle.loads(forged["pickle"])
    assert (tmp_path / "ran").exists(), "the payload does nothing"
    (tmp_path / "ran").unlink()
    for name, content in forged.items():
        with (
            refuses(DamagedArtifact, match=r"square-0-000001\.done:") as error,
            resumable_scratch(tmp_path / name, WorkerPool(1)) as scratch,
        ):
            record = hashlib.sha256(content).digest() + content
            (scratch.root / "square-0-000001.done").write_bytes(record)
            list(scratch.map(square, range(3)))
        assert "\n" not in error.value.message and not (tmp_path / "ran").exists()
        assert not (tmp_path / name).exists(), "the next attempt starts from scratch"


def test_a_partitioned_directory_with_dates_in_text_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(2)
    for year in range(2020, 2026):
        (tmp_path / f"in/year={year}").mkdir(parents=True)
        days = [f"{year}-03-{day:02d}" for day in draw.integers(1, 29, ROWS)]
        table = pa.table({"day": days, "x": draw.normal(size=ROWS), "y": draw.integers(0, 2, ROWS)})
        pq.write_table(table, tmp_path / f"in/year={year}/part.parquet")
    scratch = killed(tmp_path / "in", tmp_path, "table.encode_unit", 4)
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", tmp_path / "in", scratch=scratch)
    # For each file its texts were tried, and it was scanned; and three were encoded.
    assert done["encode_unit"] == 3
    same_wording(capsys.readouterr().err)
    assert again.check_sha256().fingerprint == prepare(tmp_path / "whole", tmp_path / "in").fingerprint
    types = {column["name"]: column["type"] for column in again.read_json("card.json")["columns"]}
    assert types == {"day": "time", "x": "number", "y": "integer", "year": "integer"}


#: Fingerprints a file, puts another into its place, and is killed in the fourth unit.
OVERTAKEN = """
import os, shutil, signal, sys
from pathlib import Path
from slipstream.pipeline.prepare import engine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source

data, other, directory, scratch = sys.argv[1:]
listing, scan_units = list_source(data), engine.scan_units

def killed(*arguments):
    for number, part in enumerate(scan_units(*arguments)):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield part

shutil.copy(other, data)
engine.scan_units = killed
engine.prepare(Path(directory), listing, "y", DataConfig(), {}, 1, Path(scratch))
"""


def test_what_was_made_of_other_bytes_meanwhile_is_not_taken_up(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that could have said that the file was changed was killed, and the first bytes are back."""
    table, first = pq.read_table(parquet), parquet.read_bytes()
    other = tmp_path / "other.parquet"
    pq.write_table(table.set_column(0, "x", pa.array(np.arange(float(len(table))))), other, row_group_size=ROWS)
    command: list[str | Path] = [
        sys.executable,
        "-c",
        OVERTAKEN,
        parquet,
        other,
        tmp_path / "first",
        tmp_path / "scratch",
    ]
    assert subprocess.run(command).returncode == -signal.SIGKILL, "it was not killed"
    assert len(list((tmp_path / "scratch").glob(f"scan*{RECORD}"))) > 2
    parquet.write_bytes(first)
    done = counted(monkeypatch)
    again = prepare(tmp_path / "again", parquet, scratch=tmp_path / "scratch")
    assert done["scan_unit"] == GROUPS and "resumes" not in capsys.readouterr().err
    assert again.check_sha256().fingerprint == prepare(tmp_path / "whole", parquet).fingerprint


def test_a_table_in_memory_goes_on_only_if_it_is_the_same(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, scratch = pq.read_table(parquet), tmp_path / "scratch"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted(directory: str) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "merge_all", stop)
            engine.prepare(tmp_path / directory, table, "y", DataConfig(), {}, 1, scratch)

    interrupted("first")
    done = counted(monkeypatch)
    interrupted("same")
    assert not done
    other = engine.prepare(tmp_path / "other", table.slice(7), "y", DataConfig(), {}, 1, scratch)
    assert done["scan_unit"] and not scratch.exists()
    assert other.fingerprint == engine.prepare(tmp_path / "whole", table.slice(7), "y", DataConfig(), {}, 1).fingerprint
