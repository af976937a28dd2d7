"""Fresh process groups: dead, hanging and missing workers are named in time, and no process is left over."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from slipstream.pipeline.collectives.launch.worker import WorkerContext, WorkerOutcome, raise_if_failed
from slipstream.pipeline.collectives.launch.worker_group import LeaderUnreachable, WorkerGroup
from slipstream.shared.errors import Interrupted, UserError
from tests.support import alone

#: It compares times.
pytestmark = pytest.mark.alone


def who(worker: WorkerContext) -> dict[str, object]:
    ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (dist.get_rank(), os.getpid(), os.environ.get("KNOB", "")))
    return {"ranks": ranks}


def test_each_launch_is_a_fresh_group_with_its_environment() -> None:
    workers = WorkerGroup.local(2, 20)
    first = workers.launch(who)["ranks"]
    second = workers.launch(who, environment={"KNOB": "4"})["ranks"]
    assert [rank for rank, *_ in first] == [rank for rank, *_ in second] == [0, 1]
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in second}
    assert [knob for *_, knob in first + second] == ["", "", "4", "4"]


def trouble(worker: WorkerContext, kind: str, rank: int) -> None:
    worker.set_activity("the part that fails")
    if dist.get_rank() == rank:
        if kind == "refuse":
            raise UserError("largest: too much")
        if kind == "bug":
            raise KeyError("no such thing")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(1000):
        dist.barrier()
        time.sleep(0.05)


def trouble_while_peers_wait(worker: WorkerContext) -> None:
    vars(dist)["destroy_process_group"] = alone.wait_for_peers
    if dist.get_rank():
        time.sleep(alone.DESTROY_S)
    raise KeyError("no such thing")


@pytest.mark.prove
def test_the_cause_is_there_at_once_though_the_group_cannot_be_taken_down() -> None:
    workers, started = WorkerGroup.local(2, 20), time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 .*KeyError"):
        workers.launch(trouble_while_peers_wait)
    # The other rank has five seconds to end.
    assert time.monotonic() - started < 15


def test_some_of_the_ranks_are_a_group_of_their_own() -> None:
    workers = WorkerGroup.local(3, 20)
    assert [rank for rank, *_ in workers.launch(who, ranks_by_host=[[0, 2]])["ranks"]] == [0, 1]
    assert len(workers.launch(who)["ranks"]) == 3
    # Named by its rank outside of the group.
    with pytest.raises(Interrupted, match=r"^rank 2 died"):
        workers.launch(trouble, "die", 1, ranks_by_host=[[0, 2]])


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        pytest.param("refuse", UserError, "^largest: too much$", marks=pytest.mark.prove),
        pytest.param(
            "bug", RuntimeError, "rank 2 failed during the part that fails: .*KeyError", marks=pytest.mark.prove
        ),
        ("die", Interrupted, "^rank 2 died .SIGKILL.* during the part that fails$"),
        pytest.param(
            "hang",
            Interrupted,
            "^rank 2 did not continue within 2 s, during the part that fails$",
            marks=pytest.mark.prove,
        ),
    ],
)
def test_the_rank_to_blame_is_named_in_time(kind: str, error: type[Exception], said: str) -> None:
    started = time.monotonic()
    workers = WorkerGroup.local(3, 2)
    with pytest.raises(error, match=f"(?s){said}"):
        workers.launch(trouble, kind, 2)
    assert time.monotonic() - started < 2 + 25
    left = [child for child in psutil.Process().children(recursive=True) if child.status() == psutil.STATUS_STOPPED]
    assert not left
    # And the next launch succeeds.
    assert len(workers.launch(who)["ranks"]) == 3


def parents(world: int, ranks: list[int], versions: list[str], timeout: float) -> dict[int, str]:
    """What each of several parents of one rank says of their meeting."""
    leader = WorkerGroup.local(world, timeout)
    said: dict[int, str] = {}

    def meet(rank: int) -> None:
        store = leader.store if rank == 0 else dist.TCPStore("127.0.0.1", leader.port, is_master=False)
        try:
            WorkerGroup(store, "127.0.0.1", leader.port, world, (rank,), world, timeout).rendezvous(
                {"torch": versions[rank]}
            )
            said[rank] = "met"
        except (Interrupted, UserError) as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_a_rank_that_never_arrives_is_named() -> None:
    said = parents(3, [0, 2], ["2.13"] * 3, 1.0)
    assert said == dict.fromkeys((0, 2), "rank 1 of 3 did not arrive within 1 s")
    assert parents(2, [0, 1], ["2.13"] * 2, 5.0) == {0: "met", 1: "met"}


def test_ranks_of_different_versions_are_refused() -> None:
    said = parents(2, [0, 1], ["2.13", "2.12"], 5.0)
    assert set(said.values()) == {"rank 1 has torch 2.12, rank 0 has 2.13; all ranks have to run the same versions"}


def test_without_the_rest_of_the_environment_it_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^WORLD_SIZE and LOCAL_RANK and MASTER_PORT: "):
        WorkerGroup.from_environment({"RANK": "0", "MASTER_ADDR": "localhost"}, 1)


def test_a_leader_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    from slipstream.operations.proofs.processes import free_port

    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(LeaderUnreachable, match=r"^rank 1: rank 0 at 127.0.0.1:.* 1 s$"):
        WorkerGroup.from_environment({**place, "MASTER_PORT": str(free_port())}, 1)


def test_the_worst_outcome_explains_the_others() -> None:
    lost = WorkerOutcome("lost", "Connection closed by peer", "all_reduce")
    raise_if_failed({0: WorkerOutcome("done"), 1: WorkerOutcome("done")}, 5)
    with pytest.raises(Interrupted, match=r"^rank 1 died"):
        raise_if_failed({0: lost, 1: WorkerOutcome("died", "SIGKILL", "all_reduce"), 2: WorkerOutcome("silent")}, 5)
    with pytest.raises(Interrupted, match=r"^ranks 1, 2 .* 5 s, .* all_reduce$"):
        raise_if_failed({0: lost, 1: WorkerOutcome("silent", "", "all_reduce"), 2: WorkerOutcome("silent")}, 5)
    with pytest.raises(Interrupted, match=r"^rank 0 .* all_reduce: Connection closed"):
        raise_if_failed({0: lost}, 5)
