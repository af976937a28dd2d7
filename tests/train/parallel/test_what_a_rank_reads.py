"""A rank that resumes under another layout reads little more than its part of a checkpoint."""

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.operations.proofs.gpu.layouts import LayoutCase, set_up, train_divided
from slipstream.pipeline.train.checkpoint import manager, restore, shards
from tests.support.layout_runs import divided, on_ranks

#: Large enough for parts of tensors that are larger than a block.
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
SAVED = {"replicas 2": LayoutCase(2, {}), "weights 3": LayoutCase(3, {"shard": "weights"})}
#: How many ranks are on a machine: those of a tensor group, which hold columns of the same rows.
RESUMED = {
    "weights 4": (LayoutCase(4, {"shard": "weights"}), 1),
    "replicas 2": (LayoutCase(2, {}), 2),
    "tensor 2": (LayoutCase(2, {"tensor": 2}), 2),
    "1f1b 2": (LayoutCase(2, {"pipeline": 2}), 1),
    "2 x 2 x 2": (LayoutCase(8, {"pipeline": 2, "shard": "weights", "tensor": 2}), 2),
}
EVERY = [(first, then) for first in SAVED for then in RESUMED]


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def resume_on_machines(case: LayoutCase, per_machine: int, place: Path) -> tuple[int, int, int]:
    """The bytes that this rank holds of the checkpoint, brings of it, and those of the largest tensor."""
    directory = place / f"machine-{int(os.environ['RANK']) // per_machine}"
    directory.mkdir(parents=True, exist_ok=True)
    # Ranks are on one machine if they have the same temporary directory.
    tempfile.tempdir = str(directory)
    held, brought, largest = [0], [0], [0]
    pieces_read, read_verified = manager.pieces_read, restore.read_verified

    def noted_pieces(tensors: dict[str, Tensor], index: dict[str, Any]) -> Any:
        held[0] = sum(local_bytes(tensor) for tensor in tensors.values())
        largest[0] = max(tensor.nbytes for tensor in tensors.values())
        return pieces_read(tensors, index)

    def noted_bytes(*arguments: Any) -> bytes:
        data = read_verified(*arguments)
        brought[0] += len(data)
        return data

    manager.pieces_read, restore.read_verified = noted_pieces, noted_bytes  # type: ignore[assignment]
    train_divided(case)
    return held[0], brought[0], largest[0]


def status_bytes(name: str) -> int:
    """A figure of ``/proc/self/status``: VmRSS, what this process has in memory, or VmHWM, the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def memory_of_a_restore(case: LayoutCase) -> tuple[int, int, int]:
    """The bytes that this rank holds of the checkpoint, those of the largest tensor, and the most by which the memory
    of its process grew during the restore, with all that it then held for the first time."""
    held, largest, grown = [0], [0], [0]
    pieces_read, restored = manager.pieces_read, manager.Checkpoints.restore

    def noted_pieces(tensors: dict[str, Tensor], index: dict[str, Any]) -> Any:
        held[0] = sum(local_bytes(tensor) for tensor in tensors.values())
        largest[0] = max(tensor.nbytes for tensor in tensors.values())
        return pieces_read(tensors, index)

    def watched(*arguments: Any, **named: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the most is counted from now on
        before = status_bytes("VmRSS")
        found = restored(*arguments, **named)
        grown[0] = status_bytes("VmHWM") - before
        return found

    manager.pieces_read = noted_pieces  # type: ignore[assignment]
    manager.Checkpoints.restore = watched  # type: ignore[method-assign]
    checkpoints = set_up(case).checkpoints
    assert checkpoints is not None and checkpoints.restore() is not None
    return held[0], largest[0], grown[0]


def save(case: LayoutCase) -> None:
    """Weights and moments, after a step whose gradients are nought."""
    part = set_up(case)
    for parameter in part.model.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    part.optimizer.step()
    assert part.checkpoints is not None
    part.checkpoints.save(1, {})
    part.checkpoints.finish()


@pytest.mark.prove
@pytest.mark.parametrize("then", ["weights 4", "1f1b 2", "2 x 2 x 2"])
def test_a_rank_holds_its_share(then: str, tmp_path: Path) -> None:
    """Besides its share, 300 to 80 MB of 600, what is on its way: 64 MiB of requests and, copied, one block."""
    large = {**LARGE, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}
    home = str(tmp_path / "home")
    on_ranks(3, partial(save, replace(SAVED["weights 3"], model=large, double=False, home=home)), tmp_path / "saved")
    case = replace(RESUMED[then][0], model=large, double=False, home=home)
    for held, largest, grown in on_ranks(case.world, partial(memory_of_a_restore, case), tmp_path / "resumed"):
        print(f"{then}: held {held >> 20} MiB, largest {largest >> 20} MiB, grown {grown >> 20} MiB")
        on_its_way = restore.RUN_BYTES * restore.REQUESTS + shards.READ_BYTES
        assert 0 < grown <= 1.3 * held + largest + on_its_way


@pytest.mark.prove
@pytest.mark.parametrize(("first", "then"), EVERY)
def test_a_rank_brings_its_share(first: str, then: str, tmp_path: Path) -> None:
    made = replace(SAVED[first], model=LARGE, steps=1, save_at=1, double=False, home=str(tmp_path / "home"))
    divided(made, tmp_path / "saved")
    case, per_machine = RESUMED[then]
    resumed = replace(case, model=LARGE, steps=1, double=False, home=made.home, resume=True)
    work = partial(resume_on_machines, resumed, per_machine, tmp_path)
    ranks = on_ranks(case.world, work, tmp_path / "resumed")
    whole = sum(path.stat().st_size for path in (tmp_path / "home").glob("step-*/tensors-*"))
    assert sum(brought for _, brought, _ in ranks) >= whole
    for held, brought, largest in ranks:
        assert 0 < brought <= 1.3 * held + largest
        assert case.world < 4 or brought < whole / 2
