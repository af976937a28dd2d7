"""The snapshot is copied while training goes on, and is of its moment all the same."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

from slipstream.train.checkpoint.staging import Buffers
from tests.support.small_run import Run, same

MAIN = threading.main_thread().ident
LONG = 30.0


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies in the background begin when this is set."""
    copy, allowed = Buffers._copy, threading.Event()

    def copy_later(self: Buffers, tensors: dict[str, torch.Tensor]) -> None:
        assert threading.get_ident() == MAIN or allowed.wait(LONG)
        copy(self, tensors)

    monkeypatch.setattr(Buffers, "_copy", copy_later)
    return allowed


def allow_when_the_loop_waits(allowed: threading.Event) -> None:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        if any(frame.name == "wait_for_copy" for frame in traceback.extract_stack(sys._current_frames()[MAIN or 0])):
            allowed.set()
            return
        time.sleep(0.01)


def test_the_next_step_waits_for_the_snapshot_and_the_passes_before_it_do_not(
    tmp_path: Path, allowed: threading.Event
) -> None:
    run = Run(tmp_path)
    run.steps(2)
    before = {name: tensor.clone() for name, tensor in run.everything().items()}
    run.checkpoints.save(2, {"step": 2})
    # BatchNorm's statistics change in the forward pass, the weights in the optimiser's step.
    run.model(torch.randn(16, 4)).square().sum().backward()
    assert not torch.equal(run.everything()["2.running_mean"], before["2.running_mean"])
    assert run.checkpoints.background.pop_step_wait() is None and run.checkpoints.background.busy()
    threading.Thread(target=allow_when_the_loop_waits, args=(allowed,), daemon=True).start()
    run.optimizer.step()
    assert allowed.is_set()
    wait = run.checkpoints.background.pop_step_wait()
    assert wait is not None and wait.stall() > 0.0
    assert run.checkpoints.background.pop_step_wait() is None, "a wait is told once"
    run.checkpoints.finish()
    assert not same(run.everything(), before)
    resumed = Run(tmp_path)
    assert resumed.checkpoints.restore() is not None
    assert same(resumed.everything(), before)


def test_weights_that_something_else_changes_meanwhile_are_no_checkpoint(
    tmp_path: Path, allowed: threading.Event
) -> None:
    run = Run(tmp_path)
    run.steps(1)
    run.checkpoints.save(1, {"step": 1})
    first = run.model[0]
    assert isinstance(first, torch.nn.Linear)
    with torch.no_grad():
        first.weight.mul_(2)
    allowed.set()
    with pytest.raises(RuntimeError, match=r"^model/0.weight changed while a checkpoint was taken"):
        run.checkpoints.finish()
    assert Run(tmp_path).checkpoints.restore() is None


def test_tensors_of_the_progress_are_copied_beside_the_steps_too(tmp_path: Path, allowed: threading.Event) -> None:
    run = Run(tmp_path)
    run.steps(1)
    best = torch.arange(3.0)
    run.checkpoints.save(1, {"best": best})
    assert run.checkpoints.background.busy() and not allowed.is_set()
    threading.Thread(target=allow_when_the_loop_waits, args=(allowed,), daemon=True).start()
    run.checkpoints.background.wait_for_copy()
    best.add_(1)
    run.checkpoints.finish()
    restored = Run(tmp_path).checkpoints.restore()
    assert restored is not None and restored.progress["best"].tolist() == [0, 1, 2]


def test_the_step_loop_waits_for_no_thread_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, starters = threading.Thread.start, []

    def noted(self: threading.Thread) -> None:
        starters.append(threading.get_ident())
        start(self)

    run = Run(tmp_path)
    run.checkpoints.prepare({"step": 0})
    monkeypatch.setattr(threading.Thread, "start", noted)
    for step in (1, 2):
        run.steps(1)
        run.save(step)
    assert len(starters) == 2 and MAIN not in starters


FAKE_GPUS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.train.checkpoint.staging import with_placement_of

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
meta = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
live = DTensor(torch.empty(2, 2, device="meta"), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
staged = with_placement_of(live, torch.ones(2, 2))
print(staged.to_local().device, tuple(staged.shape), staged.placements == live.placements)
"""


def test_what_is_staged_of_a_divided_gpu_tensor_stays_on_the_host() -> None:
    run = subprocess.run([sys.executable, "-c", FAKE_GPUS], capture_output=True, text=True)
    assert run.stdout == "cpu (4, 2) True\n", run.stderr
