"""Requests between ranks from background threads."""

from datetime import timedelta

import torch.distributed as dist

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.shared.distributed.process_group import Peers

WORLD = 3


def rank_main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    peers = Peers.connect(timedelta(seconds=30))
    asked = [peers.any(rank == who) for who in range(WORLD)]
    assert [answer() for answer in asked] == [[True]] * WORLD
    assert peers.any(True)() == [True] and peers.any(False)() == [False]
    # Several questions at once, each on its own.
    assert peers.any(rank == 0, False, rank == 2, True)() == [True, False, True, True]
    dist.barrier()
    dist.destroy_process_group()


def test_what_holds_on_one_rank_all_ranks_know() -> None:
    port = free_port()
    ranks = [FORK.Process(target=rank_main, args=(rank, port), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * WORLD
    assert Peers(0, 1, None).any(True, False)() == [True, False]
