"""At the end, the other ranks wait for rank 0 to write the model, longer than a collective's timeout."""

import errno
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.distributed.user_errors import leave_after_rank_0
from slipstream.shared.models.trained import Weights
from tests.support import training
from tests.support.training import refusal, table_of_numbers, trained
from tests.support.wording import same_wording

#: The limit of a collective here, and the seconds for which rank 0 writes.
LIMIT_S, WRITING_S = 8, 11


def rank_that_writes_for_long(rank: int, *arguments: Any) -> None:
    from slipstream.pipeline.train import run

    write, group = run.write_trained, run.process_group

    def written(*of: Any) -> object:
        time.sleep(WRITING_S)
        return write(*of)

    vars(run)["write_trained"] = written
    vars(run)["process_group"] = lambda **how: group(timedelta(seconds=LIMIT_S), **how)
    training.rank_body(rank, *arguments)


@pytest.mark.prove
def test_a_model_may_take_longer_to_write_than_a_collective_may(tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 64)
    config = TrainingConfig(epochs=1, batch_size=64)
    model = trained(prepared, tmp_path / "x", 2, config, body=rank_that_writes_for_long)
    assert (model / "manifest.json").exists()


def test_rank_0_goes_last_and_misses_whoever_does_not_come() -> None:
    store = dist.HashStore()
    ranks = [threading.Thread(target=leave_after_rank_0, args=(store, rank, 3), daemon=True) for rank in range(3)]
    ranks[1].start()
    time.sleep(0.5)
    assert ranks[1].is_alive()
    ranks[0].start()
    ranks[1].join(10)
    time.sleep(0.5)
    assert ranks[0].is_alive() and not ranks[1].is_alive()
    ranks[2].start()
    for rank in (0, 2):
        ranks[rank].join(10)
        assert not ranks[rank].is_alive()
    with pytest.raises(dist.DistStoreError):
        leave_after_rank_0(dist.HashStore(), 0, 2, timeout=timedelta(seconds=0.2))


def rank_whose_disk_is_full(rank: int, *arguments: Any) -> None:
    from slipstream.pipeline.train import run

    def full(directory: Path, architecture: object, best: Weights, *more: object) -> None:
        next(iter(best.tensors()))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    vars(run)["write_trained"] = full
    training.rank_body(rank, *arguments)


@pytest.mark.prove
@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.prove), "weights"])
def test_a_model_that_finds_no_room_is_a_mistake_that_all_ranks_know_of(shard: Any, tmp_path: Path) -> None:
    """Of a divided model the other ranks are in the collectives of the tensors that rank 0 does not write."""
    prepared = table_of_numbers(tmp_path / "prepared", 64)
    config = TrainingConfig(epochs=1, batch_size=64, parallel=ParallelConfig(shard=shard))
    trained(prepared, tmp_path / "x", 2, config, body=rank_whose_disk_is_full)
    said = [refusal(tmp_path / "x", rank) for rank in range(2)]
    assert said[0] == said[1] and not list(tmp_path.glob("x/**/manifest.json"))
    same_wording(said[0])
