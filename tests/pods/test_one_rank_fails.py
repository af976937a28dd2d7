"""One rank fails while its peers wait for it: its cause is known at once, and the job does not hang until they give up.

Taking the group down never ends here, as NCCL's does not while the peers are in a collective.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from slipstream.flyte.failures import WorkerExit, collect_reports
from slipstream.flyte.forked_workers import forked_workers
from slipstream.operations.proofs.processes import FORK, free_port
from tests.support import alone

REPORTED = {
    "memory": (WorkerExit.REFUSED, "out of memory. Tried to allocate 2.00 GiB"),
    "bug": (WorkerExit.FAILED, "a bug in the step"),
    "refused": (WorkerExit.REFUSED, "data: damaged"),
    "preempted": (WorkerExit.PREEMPTED, "stopped while waiting for data"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "memory" else pytest.mark.prove) for kind in REPORTED]
)
def test_the_report_is_there_at_once_and_the_worker_gone(kind: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "train")
    config = api.LaunchConfig(1, 1, 2, run_id="alone", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    with forked_workers("train", 60, lambda: None), pytest.raises(ChildFailedError) as failed:
        api.elastic_launch(config, alone.worker)(directory, kind)
    ended, failed_at = time.time(), float((tmp_path / "train.failed").read_text())
    assert (tmp_path / "train.worker-1.json").stat().st_mtime - failed_at < 1
    assert ended - failed_at < alone.DESTROY_S / 2
    [report] = collect_reports(directory)
    outcome, message = REPORTED[kind]
    assert (report.rank, report.outcome) == (1, outcome) and message in report.message
    # And torch's agent knows it.
    rank, failure = failed.value.get_first_failure()
    assert (rank, failure.exitcode) == (1, 1) and message in str(failure.message)


@pytest.mark.parametrize("kind", ["finished", *alone.TOGETHER])
def test_ranks_that_end_together_take_their_group_down(kind: str, tmp_path: Path) -> None:
    arguments = free_port(), kind, str(tmp_path / "down")
    ranks = [FORK.Process(target=alone.end_together, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["down.0", "down.1"]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "said"),
    [pytest.param("refused", "Error: data: damaged", marks=pytest.mark.prove), ("bug", "ZeroDivisionError: a bug")],
)
def test_under_torchrun_a_rank_says_why_and_ends_at_once(kind: str, said: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from slipstream.pipeline.train.command import alone_at_once
from tests.support.alone import fail_on_rank_1
with alone_at_once():
    fail_on_rank_1({kind!r}, Path({str(tmp_path)!r}) / "failed")
"""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={"PATH": "/usr/bin", "RANK": str(rank), "LOCAL_RANK": str(rank), **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = ranks[1].communicate(timeout=60)
        assert time.time() - float((tmp_path / "failed").read_text()) < 3
    finally:
        ranks[0].kill()
        ranks[0].communicate()
    assert ranks[1].returncode == 1 and said in errors
