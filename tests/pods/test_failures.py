"""Choice of a pod's failure: that of the worker at fault, whichever torch saw first."""

import itertools
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from slipstream.flyte.elastic import DistributedTask, Workspace
from slipstream.flyte.failures import (
    AGENT_ERRORS,
    FailureReport,
    GroupEnd,
    PodPreempted,
    SmallerMicroBatches,
    WorkerExit,
    WorkerFailed,
    agent_error,
    collect_reports,
    quiet_ctrl_c,
    ran_out_of_memory,
)
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import Interrupted, OutOfMemory, Preempted, UserError

ENDINGS = {
    UserError("data.target: no such column"): UserError,
    ZeroDivisionError("a bug in the step"): WorkerFailed,
    OutOfMemory("rank 1 ran out of memory at 1 micro-batch: goes on with 2"): SmallerMicroBatches,
    Preempted("stopped at step 3, saved"): PodPreempted,
    Interrupted("DistStoreError: a peer was lost"): FlyteRecoverableException,
}


def leave(directory: Path, error: Exception, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    FailureReport.of(error).leave(str(directory))


@pytest.mark.parametrize("pair", itertools.permutations(ENDINGS, 2), ids=lambda pair: "-".join(map(str, pair)))
def test_the_worst_report_counts(
    pair: tuple[Exception, Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, error in enumerate(pair):
        leave(tmp_path / "train", error, rank, monkeypatch)
    worst = min(pair, key=list(ENDINGS).index)
    # torch saw a worker first that had lost its peer.
    failure = agent_error(FlyteRecoverableException("torch's box"), collect_reports(str(tmp_path / "train")))
    assert type(failure) is ENDINGS[worst] and str(worst) in str(failure)
    assert collect_reports(str(tmp_path / "train")) == []


def test_the_report_of_a_worker_that_is_started_again_replaces_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path / "train", ValueError("the first"), 0, monkeypatch)
    monkeypatch.setenv("RANK", "5")
    FailureReport(5, WorkerExit.FINISHED).leave(str(tmp_path / "train"))
    assert collect_reports(str(tmp_path / "train")) == [FailureReport(5, WorkerExit.FINISHED)]


def test_a_group_is_started_again_once_for_each_number_of_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third group runs out with the number of the second: it could not be told of more."""
    numbers, started = iter((1, 2, 2, 4)), list[int]()

    def execute(workspace: Workspace) -> None:
        started.append(next(numbers))
        leave(Path(workspace.directory), OutOfMemory("rank 0 ran out of memory", started[-1]), 0, monkeypatch)
        raise FlyteRecoverableException("torch's box")

    workspace = Workspace("train", str(tmp_path / "train"), "none", "", Holder())
    task: Any = SimpleNamespace(task_config=SimpleNamespace(nnodes=1), _execute=execute)
    with pytest.raises(FlyteRecoverableException):
        DistributedTask._run_workers(task, workspace, {})
    assert started == [1, 2, 2]


def test_an_agent_that_is_told_to_end_is_preempted_whatever_its_workers_made_of_it() -> None:
    reports = [
        FailureReport(0, WorkerExit.FAILED, "a socket was closed"),
        FailureReport(1, WorkerExit.PREEMPTED, "stopped at step 3, saved"),
    ]
    signalled = IgnoreOutputs()
    signalled.__context__ = SignalException("Process 7 got signal: 15", 15)  # type: ignore[arg-type]
    failure = agent_error(signalled, reports)
    assert isinstance(failure, PodPreempted) and "stopped at step 3, saved" in str(failure)
    assert "told to end: Process 7" in str(agent_error(signalled, reports[:1]))


def lost_to(exit_code: int) -> Exception:
    """The error of the plugin when a worker of rank 2 ends with ``exit_code`` first."""
    error = FlyteUserRuntimeException(RuntimeError("torch's box"))
    error.__context__ = ChildFailedError("train", {2: ProcessFailure(0, 7, exit_code, "")})
    return error


def signalled() -> Exception:
    error = IgnoreOutputs()
    error.__context__ = SignalException("Process 7 got signal: 15", 15)  # type: ignore[arg-type]
    return error


#: Errors of every kind that end a group, as the agent sees them.
GROUP_ENDS = {
    "signal": signalled(),
    "signal in the agent": signalled().__context__,
    "recoverable": FlyteRecoverableException("torch's box"),
    "lost agent": RendezvousError("the store is gone"),
    "lost peer": DistStoreError("the store is gone"),
    "lost worker": lost_to(-9),
    "other": lost_to(1),
    "no outputs": IgnoreOutputs(),
}
#: What the agent raises for a report and the end of the group: a signal, a recoverable error, a lost peer, another one.
RAISED = {
    WorkerExit.REFUSED: "user user user user",
    WorkerExit.FAILED: "preempted failed failed same",
    WorkerExit.OUT_OF_MEMORY: "preempted smaller smaller smaller",
    WorkerExit.PREEMPTED: "preempted preempted preempted same",
    WorkerExit.INTERRUPTED: "preempted retry retry same",
    WorkerExit.FINISHED: "preempted retry retry same",
    None: "preempted retry retry same",
}
KINDS = {
    "user": UserError,
    "failed": WorkerFailed,
    "smaller": SmallerMicroBatches,
    "preempted": PodPreempted,
    "retry": FlyteRecoverableException,
}
#: The column of :data:`RAISED` for every kind of end.
COLUMNS = dict(zip(GROUP_ENDS, (0, 0, 1, 2, 2, 2, 3, 3), strict=True))


@pytest.mark.parametrize(("outcome", "end"), itertools.product([*WorkerExit, None], GROUP_ENDS), ids=str)
def test_the_agents_error_for_every_report_and_every_end(outcome: WorkerExit | None, end: str) -> None:
    group = GROUP_ENDS[end]
    assert isinstance(group, Exception)
    reports = [] if outcome is None else [FailureReport(1, outcome, "of rank 1")]
    raised = agent_error(group, reports)
    kind = RAISED[outcome].split()[COLUMNS[end]]
    assert raised is group if kind == "same" else type(raised) is KINDS[kind]
    assert ran_out_of_memory(group, reports) == (kind == "smaller")
    told = {"signal": "told to end: Process 7", "lost agent": "the store is gone", "lost worker": "lost to SIGKILL"}
    reported = outcome is WorkerExit.PREEMPTED or kind not in ("preempted", "retry") or end == "recoverable"
    if kind != "same":
        assert ("of rank 1" if reported and reports else told.get(end, "")) in str(raised)


def test_the_table_of_failures_is_complete() -> None:
    assert AGENT_ERRORS.keys() == RAISED.keys()
    assert {len(row) for row in AGENT_ERRORS.values()} == {len(GroupEnd)}


def test_a_bug_that_torch_saw_first_stays_as_torch_put_it() -> None:
    torchs = FlyteUserRuntimeException(RuntimeError("spawn_helper FAILED"))
    assert (
        agent_error(
            torchs, [FailureReport(0, WorkerExit.FAILED, "a bug"), FailureReport(1, WorkerExit.INTERRUPTED, "lost")]
        )
        is torchs
    )


def test_torch_says_nothing_of_ctrl_c(caplog: pytest.LogCaptureFixture) -> None:
    """The agent's own code logs, so another format of its line would fail here."""

    def ended_by(number: signal.Signals) -> None:
        agent = mock.Mock(_shutdown_timeout=0, _invoke_run=mock.Mock(side_effect=SignalException("told", number)))
        api.SimpleElasticAgent.run(agent)

    quiet_ctrl_c()
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(SignalException):
            ended_by(number)
    assert [record.args for record in caplog.records] == [(signal.SIGTERM,)]


def test_torchs_lines_about_its_processes_on_ctrl_c_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def closed_by(number: signal.Signals) -> None:
        process = mock.Mock(pid=2**31 - 1, is_alive=mock.Mock(side_effect=[True, False, False, False]))
        processes.MultiprocessContext._close(mock.Mock(_pc=mock.Mock(processes=[process])), number, timeout=0)

    quiet_ctrl_c()
    for number in (signal.SIGTERM, signal.SIGINT):
        closed_by(number)
    assert [record.args for record in caplog.records] == [(2**31 - 1, "SIGTERM")]
