"""Sharded state (FSDP2): every rank writes its own part, and any number of ranks reads it back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState


def rank_main(rank: int, world: int, port: int, home: str, restores: bool, place: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(1 if restores else 0)
    # An odd number of rows: no two worlds cut it alike.
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(home, AppState(model, optimizer), ResumePolicy({}))
    if restores:
        restored = checkpoints.restore()
        assert restored is not None and restored.step == 3
    else:
        for _ in range(3):
            model(torch.ones(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(3, {})
        checkpoints.finish()
    state = [*model.parameters(), *(optimizer.state[p]["exp_avg_sq"] for p in model.parameters())]
    assert all(isinstance(tensor, DTensor) for tensor in state)
    whole = [tensor.detach().full_tensor() for tensor in state]
    if rank == 0:
        torch.save(whole, place)
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, home: Path, restores: bool, place: Path) -> list[Any]:
    port = free_port()
    arguments = [(rank, world, port, str(home), restores, place) for rank in range(world)]
    ranks = [FORK.Process(target=rank_main, args=a, daemon=True) for a in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * world
    return torch.load(place)


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.prove)])
def test_shards_go_from_three_ranks_to_two_or_to_one(world: int, tmp_path: Path) -> None:
    home = tmp_path / "home"
    saved = run(3, home, False, tmp_path / "saved")
    files = sorted(path.name for path in home.glob("step-*/tensors-*"))
    assert files == ["tensors-00000.bin", "tensors-00001.bin", "tensors-00002.bin"]
    restored = run(world, home, True, tmp_path / "restored")
    assert all(torch.equal(a, b) for a, b in zip(restored, saved, strict=True))
