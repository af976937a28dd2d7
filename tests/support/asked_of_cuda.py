"""Stand-in for CUDA's streams and events that records their calls; copies are made on the CPU at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Runtime:
    """What CUDA's runtime has pinned, by address, and how often it pinned anything."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls, self.status = 0, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        self.pinned[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


class Cuda:
    """Streams and events are numbered as they are made; ``asked`` is what they were asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._streams = self._events = 0
        runtime = Runtime()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StreamOrEvent(self, "current stream"))
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        foreach_copy = torch._foreach_copy_

        def copied(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
            self.asked.append(f"copy {len(sources)} tensors{'' if non_blocking else ' and wait'}")
            foreach_copy(targets, [source.as_subclass(Tensor) for source in sources], non_blocking)

        monkeypatch.setattr(torch, "_foreach_copy_", copied)

    def taken(self) -> list[str]:
        """What was asked since the last time."""
        asked, self.asked = self.asked, []
        return asked

    def _stream(self, device: object) -> Any:
        self._streams += 1
        return StreamOrEvent(self, f"stream {self._streams}")

    def _event(self, *, enable_timing: bool = False, blocking: bool = False) -> Any:
        self._events += 1
        kind = f"{'' if blocking else 'spinning '}{'timed ' if enable_timing else ''}event"
        return StreamOrEvent(self, f"{kind} {self._events}")

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self.asked.append(f"on {stream.name}:")
        yield


class StreamOrEvent:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def record_event(self) -> StreamOrEvent:
        return StreamOrEvent(self._cuda, f"work of {self.name}")

    def wait_event(self, event: StreamOrEvent) -> None:
        self._cuda.asked.append(f"{self.name} after {event.name}")

    def record(self, stream: StreamOrEvent) -> None:
        self._cuda.asked.append(f"{self.name} on {stream.name}")

    def synchronize(self) -> None:
        self._cuda.asked.append(f"host waits for {self.name}")

    def elapsed_time(self, later: StreamOrEvent) -> float:
        """Milliseconds."""
        return 5.0
