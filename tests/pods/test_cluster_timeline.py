"""The page of a rehearsal names failed attempts, their causes and budgets, and loads nothing from elsewhere."""

from pathlib import Path

import pytest

from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, RetryBudget
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.record import ExecutionRecord, TaskAttempt, attempt_steps, short
from slipstream.operations.proofs.rehearsal.timeline import WIDTH, execution_chart, write_page
from slipstream.shared.artifacts.results.ledger import AttemptRecord
from tests.support.report_pages import HOSTILE, Parsed

MAPPED = f"tasks.prepare.map_scan_share_{32 * 'a'}-arraynode"


@pytest.fixture
def record(tmp_path: Path) -> ExecutionRecord:
    """A training of two workers whose first attempt fails, and a mapped task that is found in the cache."""
    said: list[str] = []
    made, budget = ExecutionRecord(said.append), RetryBudget(retries=1, interruptible=True)
    for number, verdict in enumerate((AttemptOutcome("user", f"lost {HOSTILE}"), AttemptOutcome("", ""))):
        attempt = made.begin("n3", "tasks.train.train", number, budget, pods=2)
        for worker in range(2):
            name = f"n3-{number}-worker-{worker}"
            attempt.pods.append(PodProcess.start(name, ["true"], {}, tmp_path / name, 1.0))
            attempt.pods[-1].waiting.join()
        if verdict.payer:
            attempt.pods[0].struck = "SIGKILL"
            budget.spend(verdict)
        made.end(attempt, verdict)
    made.looked_up("n2/0", MAPPED, True)
    made.looked_up("n3", "tasks.train.train", False)
    made.ended = attempt.ended
    assert [line.split()[2:4] for line in said] == [["n3", "train"]] * 4 + [["n2/0", "scan_share"]]
    return made


def test_every_pod_has_its_place_and_every_failure_its_number(record: ExecutionRecord) -> None:
    drawn = execution_chart("disturbed", record)
    assert [row.name for row in drawn.rows] == ["train n3 · worker 0", "train n3 · worker 1"]
    assert [[(bar.kind, bar.failure) for bar in row.bars] for row in drawn.rows] == [
        [("user", 1), ("succeeded", 0)]
    ] * 2
    assert all(bar.x + bar.width <= WIDTH for row in drawn.rows for bar in row.bars)
    (failure,) = drawn.failures
    assert (failure.task, failure.attempt, failure.struck, failure.payer) == ("train", 0, "worker 0: SIGKILL", "user")
    assert drawn.hits == (f"{short(MAPPED)} n2/0",)
    assert drawn.summary == (
        "1 nodes ran in 2 attempts with 4 pods; 1 attempts failed: 1 paid by the user, 0 paid by the system; "
        "1 of 2 cached nodes were hits"
    )


def test_the_page_loads_nothing_and_takes_causes_for_text(record: ExecutionRecord, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "Rehearsal", "shrunk", {"disturbed": record}, ["all 1 kills fired"])
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert not parsed.tags & {"script", "link", "img"} and not parsed.attributes.keys() & {"src", "href", "onerror"}
    assert "alert(1)" in parsed.text and "all 1 kills fired" in parsed.text


def test_the_page_says_where_every_attempt_at_the_training_resumed(record: ExecutionRecord, tmp_path: Path) -> None:
    """Of four attempts: killed at step 30 with 20 saved, before its first record, at 41 by an old record, and
    finished; and of an attempt of another execution."""
    attempts = [
        TaskAttempt("n3", "train", number, True, 100.0 * number, ended=100.0 * number + 90) for number in range(4)
    ]
    stored = [
        AttemptRecord(1, 2, 0, 30, began_at=10.0),
        AttemptRecord(2, 2, 20, 41, began_at=210.0),
        AttemptRecord(3, 2, 45, 60, began_at=310.0),
        AttemptRecord(1, 2, 7, 99, began_at=1000.0),
    ]
    record.steps = attempt_steps(attempts, stored)
    assert [(each.resumed, each.left, each.lost) for each in record.steps] == [
        (0, 30, 10),
        (None, None, None),
        (20, 45, 0),
        (45, 60, 0),
    ]
    write_page(tmp_path / "page.html", "Rehearsal", "shrunk", {"disturbed": record}, [])
    page = (tmp_path / "page.html").read_text()
    for cells in ("0</td><td>0</td><td>30</td><td>10", "2</td><td>20</td><td>45</td><td>0"):
        assert f"<tr><td>{cells}</td></tr>" in page
    assert page.count("ended before its first record") == 1
