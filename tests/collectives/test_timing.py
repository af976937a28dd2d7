"""Timing of iterations: no resets in between, the slowest rank counts, and it ends once the median is known."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slipstream.pipeline.collectives.config import OPERATIONS, CollectivesConfig
from slipstream.pipeline.collectives.launch import timing
from slipstream.pipeline.collectives.launch.measurements import MatrixProduct, measure_all_cases
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.operations.cases import OperationCase, OperationKind, prepare_case
from slipstream.shared.interconnect.profile import Launch, Mode
from tests.support.worker_groups import in_group

#: It compares times.
pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


def touched(worker: WorkerContext) -> dict[str, Any]:
    """An all_reduce that is timed: fills and runs, and whether it stays finite."""
    case = prepare_case(OperationKind("all_reduce", reduction="sum", in_place=True), 4000, CPU)
    events: list[str] = []
    fill, start = OperationCase.fill, case.start

    def filling(self: OperationCase) -> None:
        events.append("fill")
        fill(self)

    def starting() -> Any:
        events.append("run")
        return start()

    OperationCase.fill = filling  # type: ignore[method-assign]
    case = replace(case, start=starting)
    launch = timing.time_cases([case], "loop", 0.05, CPU)
    return {"events": events, "finite": bool(case.target.isfinite().all()), "iterations": len(launch.seconds)}


def test_nothing_is_reset_between_timed_iterations_and_the_data_stays_finite() -> None:
    found = in_group(2, touched)
    runs = "".join("f" if event == "fill" else "r" for event in found["events"])
    warm = "r" * timing.WARM_UP
    assert runs == f"{warm}fr{'r' * found['iterations']}fr"
    assert found["iterations"] >= timing.FEWEST and found["finite"]


def sleepy(worker: WorkerContext) -> Launch:
    case = prepare_case(OperationKind("broadcast", in_place=True), 400, CPU)

    def start() -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.004)
        return case.start()

    return timing.time_cases([replace(case, start=start)], "loop", 0.05, CPU)


def test_an_iteration_takes_as_long_as_on_the_slowest_rank() -> None:
    # The sender of a small broadcast waits for no rank: its own clock does not show the slow receiver.
    found = in_group(2, sleepy)
    assert min(found.seconds) >= 0.004
    assert len(found.by_rank) == 2 and found.by_rank[1] >= 0.004


def test_the_median_is_known_by_order_statistics() -> None:
    generator = np.random.default_rng(0)
    assert not timing.is_narrow(np.full(timing.BELIEVED - 1, 1.0))
    assert timing.is_narrow(np.full(timing.BELIEVED, 1.0))
    assert timing.is_narrow(generator.normal(1, 0.02, 100))
    assert not timing.is_narrow(generator.normal(1, 0.3, 100))
    # A tail does not matter to a median.
    assert timing.is_narrow(np.concatenate([generator.normal(1, 0.005, 100), np.full(20, 50.0)]))


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of series that end as narrow, the median is within 2 % of the truth in 95 of 100."""
    generator = np.random.default_rng(1)
    missed = ended = 0
    for _ in range(400):
        values = np.exp(generator.normal(0, 0.08, 400))
        narrow = next((n for n in range(20, 401, 20) if timing.is_narrow(values[:n])), None)
        if narrow:
            ended += 1
            missed += abs(np.median(values[:narrow]) - 1) > timing.NARROW
    # Looking again and again stops a little early: what is promised is known to within that.
    assert ended > 300 and missed / ended < 0.10


def stopped(worker: WorkerContext, budget: float) -> tuple[int, bool]:
    case = prepare_case(OperationKind("all_reduce", reduction="sum", in_place=True), 400, CPU)

    def start() -> list[Any]:
        time.sleep(0.01)
        return []

    slow = timing.time_cases([replace(case, start=start, after=())], "loop", budget, CPU)
    return len(slow.seconds), slow.narrow


def test_it_ends_when_the_time_is_over_and_says_so() -> None:
    count, narrow = in_group(2, stopped, 0.1)
    assert timing.FEWEST <= count <= 15 and not narrow


@pytest.mark.prove
def test_a_steady_case_ends_before_the_time_is_over() -> None:
    count, narrow = in_group(2, stopped, 20.0)
    assert narrow and timing.BELIEVED <= count < 500


def measured_in_every_way(worker: WorkerContext) -> list[tuple[str, str, int, int, float]]:
    config = CollectivesConfig(
        operations=[name for name in OPERATIONS if name != "barrier"],
        modes=["loop", "barrier"],
        in_flight=[1, 4],
        smallest=4096,
        largest=4096,
        budget=0.001,
    )
    return [(m.operation, m.mode, m.in_flight, m.bytes, m.p50) for m in measure_all_cases(worker, config)]


def test_every_operation_is_measured_in_both_modes_and_with_several_in_flight() -> None:
    # Results are checked in each of them, with as many in flight.
    found = in_group(2, measured_in_every_way)
    moving = [name for name in OPERATIONS if name != "barrier"]
    assert [case[:3] for case in found] == [
        (name, mode, in_flight) for name in moving for in_flight in (1, 4) for mode in ("loop", "barrier")
    ]
    assert all(0 < size <= 4096 and seconds > 0 for *_, size, seconds in found)


def order_of_events(worker: WorkerContext, mode: Mode) -> list[str]:
    """What rank 0 does in 3 iterations with 2 operations in flight."""
    events: list[str] = []
    barrier = dist.barrier

    class Pending:
        def wait(self) -> None:
            events.append("wait")

    def start() -> list[Any]:
        events.append("start")
        return [Pending()]

    def waiting(**more: Any) -> Any:
        events.append("barrier")
        return barrier(**more)

    case = prepare_case(OperationKind("broadcast", in_place=True), 400, CPU)
    dist.barrier = waiting  # type: ignore[assignment]
    timing.time_block([replace(case, start=start)] * 2, mode, 3, CPU)
    return events[:]  # without those of the end


def test_a_barrier_stands_before_each_iteration_of_its_mode_and_all_in_flight_start_before_one_is_waited_for() -> None:
    once = ["start", "start", "wait", "wait"]
    assert in_group(2, order_of_events, "loop") == ["barrier", *once * 3]
    assert in_group(2, order_of_events, "barrier") == ["barrier", *["barrier", *once] * 3]


class Gpu:
    """A device with a clock of its own: events and kernels wait in its stream, and calls take the host time."""

    launch, kernel = 20e-6, 0.0

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.events = 0

    def event(self, **_: Any) -> Any:
        gpu = self

        class Event:
            def record(self) -> None:
                gpu.events += 1
                self.at = gpu.device = max(gpu.device, gpu.host)

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.at - self.at)

        return Event()

    def start(self) -> list[Any]:
        self.host += self.launch
        self.device = max(self.device, self.host) + self.kernel
        return []

    def synchronise(self) -> None:
        self.host = self.device = max(self.host, self.device)


def on_a_gpu(worker: WorkerContext, kernel: float, mode: Mode) -> tuple[list[float], int]:
    """The seconds that are found of a kernel that takes so long, and how many events that took."""
    gpu, device = Gpu(), torch.device("cuda")
    gpu.kernel = kernel
    vars(torch.cuda).update(Event=gpu.event, synchronize=gpu.synchronise)
    vars(dist)["barrier"] = gpu.synchronise
    timing.slowest_rank_seconds = lambda seconds, device: seconds
    case = prepare_case(OperationKind("broadcast", in_place=True), 400, CPU)
    launch = timing.time_cases([replace(case, start=gpu.start)], mode, 0.05, device)
    return list(launch.seconds), gpu.events


def test_of_a_small_size_a_gpus_work_is_not_added_to_its_launch() -> None:
    seconds, events = in_group(1, on_a_gpu, 15e-6, "loop")
    assert max(seconds) < 1.05 * Gpu.launch and events == 2 * (timing.FEWEST + len(seconds))
    # Each after a barrier is a call by itself.
    alone, _ = in_group(1, on_a_gpu, 15e-6, "barrier")
    assert min(alone) > 0.99 * (Gpu.launch + 15e-6)


def test_of_a_large_size_each_call_is_an_iteration() -> None:
    seconds, _ = in_group(1, on_a_gpu, 5e-3, "loop")
    assert max(seconds) < 1.01 * 5e-3 and len(seconds) <= timing.BELIEVED


def test_on_a_gpu_a_product_that_fills_it_is_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without memory stands for the GPU's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, bf16=bf16: bf16)
        with FakeTensorMode():
            product = MatrixProduct(torch.device("cuda"))
            assert product._out.shape == (4096, 4096) and product._out.dtype == dtype
            product.run()
    assert MatrixProduct(CPU)._out.dtype == torch.float32
