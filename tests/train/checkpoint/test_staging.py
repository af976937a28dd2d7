"""The snapshot is copied during training, and still holds the state of its step."""

import gc
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

from harness.dispatch import counted
from slipstream.pipeline.train.checkpoint import staging
from slipstream.pipeline.train.checkpoint.staging import SnapshotBuffers, host_buffers, stage_copies
from tests.support.asked_of_cuda import Cuda, OnGpu, Runtime
from tests.support.small_run import Run, same
from tests.support.wording import refuses

MAIN = threading.main_thread().ident
LONG = 30.0


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies in the background begin when this is set."""
    copy, allowed = staging.copy_tensors, threading.Event()

    def copy_later(buffers: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        assert threading.get_ident() == MAIN or allowed.wait(LONG)
        copy(buffers, tensors)

    monkeypatch.setattr(staging, "copy_tensors", copy_later)
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
    assert run.checkpoints.background.pop_step_wait() is None, "a wait is reported once"
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
    with refuses(RuntimeError):
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


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_of_its_own_holds_the_state_before_the_next_step(
    early: bool, tmp_path: Path, allowed: threading.Event
) -> None:
    run = Run(tmp_path)
    weights = dict(run.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    buffers = host_buffers(weights)
    run.checkpoints.background.copy(stage_copies(buffers, weights, weights.keys()))
    if early:
        with torch.no_grad():
            weights["0.weight"].add_(1)
        allowed.set()
        with refuses(RuntimeError):
            run.checkpoints.background.wait_for_copy()
        return
    threading.Thread(target=allow_when_the_loop_waits, args=(allowed,), daemon=True).start()
    run.steps(1)
    wait = run.checkpoints.background.pop_step_wait()
    assert allowed.is_set() and wait is not None and not wait.of_save
    assert same(buffers, before) and not torch.equal(weights["0.weight"], before["0.weight"])


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight": ((1025, 1000), torch.float32),
    "half": ((3, 5), torch.bfloat16),
    "mask": ((7,), torch.bool),
    "step": ((), torch.float64),
    "empty": ((0, 4), torch.float32),
}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, 2, shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def test_one_buffer_holds_tensors_of_any_type_and_shape() -> None:
    tensors = some_tensors()
    staged = SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0).stage(tensors, ["half"])()
    for name, (shape, dtype) in SHAPES.items():
        assert staged[name].shape == shape and staged[name].dtype == dtype
        assert torch.equal(staged[name], tensors[name]) and staged[name].is_contiguous()
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged.values()}) == 1


def test_what_is_pinned_is_what_the_tensors_take_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pinned memory comes in powers of two: 8 MiB for a weight of 4.1 million bytes."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensors = {name: tensor.as_subclass(OnGpu) for name, tensor in some_tensors().items()}
    buffers = SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0)
    taken = sum(tensor.nbytes for tensor in tensors.values())
    (pinned,) = runtime.pinned.values()
    assert runtime.calls == 1 and taken <= pinned <= taken + 64 * len(tensors)
    del buffers
    gc.collect()
    assert not runtime.pinned
    runtime.status = 2
    with refuses(RuntimeError):
        SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0)


def test_a_rank_that_writes_nothing_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensors = {name: tensor.as_subclass(OnGpu) for name, tensor in some_tensors().items()}
    SnapshotBuffers(tensors, dict.fromkeys(tensors, 1), 0)
    assert not runtime.calls


def test_a_snapshot_is_two_copies_however_many_tensors_there_are() -> None:
    tensors = some_tensors()
    buffers = SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0)
    assert counted(lambda: buffers.stage(tensors, ["weight", "half"])()).kernels == 2
    assert counted(lambda: buffers.stage(tensors, [])()).kernels == 1


def test_on_a_gpu_all_saves_copy_on_one_stream_and_the_host_sleeps_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    staging.copy_stream.cache_clear()
    tensors = {name: tensor.as_subclass(OnGpu) for name, tensor in some_tensors().items()}
    for save in (1, 2):
        # New buffers, as when there are other tensors than before.
        staged = SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0).stage(tensors, ["weight", "half"])()
        assert cuda.taken() == [
            "copy 3 tensors",
            "on stream 1:",
            "stream 1 after work of current stream",
            "copy 2 tensors",
            f"event {save} on stream 1",
            f"host waits for event {save}",
        ]
        assert all(torch.equal(staged[name], tensor) for name, tensor in some_tensors().items())
    staging.copy_stream.cache_clear()


FAKE_GPUS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.pipeline.train.checkpoint.staging import with_placement_of

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
meta = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
live = DTensor(torch.empty(2, 2, device="meta"), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
staged = with_placement_of(live, torch.ones(2, 2))
print(staged.to_local().device, tuple(staged.shape), staged.placements == live.placements)
"""


@pytest.mark.prove
def test_what_is_staged_of_a_divided_gpu_tensor_stays_on_the_host() -> None:
    run = subprocess.run([sys.executable, "-c", FAKE_GPUS], capture_output=True, text=True)
    assert run.stdout == "cpu (4, 2) True\n", run.stderr
