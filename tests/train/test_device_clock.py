"""A thread that waits for a GPU sleeps; a stand-in records the calls of CUDA."""

import pytest
import torch

from slipstream.pipeline.train.device_clock import CudaClock, wait_for
from tests.support.asked_of_cuda import Cuda

GPU = torch.device("cuda", 1)


def test_the_clock_waits_for_events_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    clock = CudaClock(GPU)
    begun = clock.mark().wait()
    assert clock.mark().wait() == pytest.approx(begun + 0.005)
    assert cuda.taken() == [
        "timed event 1 on current stream",
        "timed event 2 on current stream",
        "host waits for timed event 2",
        "timed event 3 on current stream",
        "host waits for timed event 3",
    ]


def test_a_stream_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    wait_for(torch.cuda.Stream(GPU))
    assert cuda.taken() == ["event 1 on stream 1", "host waits for event 1"]
