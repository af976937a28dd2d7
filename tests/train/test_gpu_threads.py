"""Threads of a rank use its GPU from the start; a stand-in records every thread's calls of CUDA."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from slipstream.pipeline.train import data_loader, device_clock
from slipstream.pipeline.train.checkpoint import publish, staging
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState
from slipstream.pipeline.train.data_loader import evaluation_batches
from slipstream.shared.artifacts.prepared.data import PreparedData
from tests.support.groups import ALONE
from tests.support.training import table_of_numbers

GPU = 3


class Notes(list[tuple[str, str]]):
    """What was done, and by which thread."""

    def add(self, what: str) -> None:
        self.append((threading.current_thread().name, what))

    def of(self, thread: str) -> list[str]:
        return [what for name, what in self if name == thread]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    cuda = Mock(is_initialized=lambda: True, current_device=lambda: GPU, set_device=lambda gpu: notes.add(f"GPU {gpu}"))
    monkeypatch.setattr(device_clock, "torch", Mock(cuda=cuda))
    return notes


def test_the_loader_sends_from_its_ranks_gpu(notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedData.open(table_of_numbers(tmp_path / "prepared", 64))
    monkeypatch.setattr(data_loader.HostBuffer, "send", lambda *_: notes.add("copies"))
    assert len(list(evaluation_batches(prepared, "test", 30, ALONE))) == 1
    assert notes.of("loader") == [f"GPU {GPU}", "copies"] and len(notes) == 2


def test_a_checkpoint_is_copied_and_published_from_its_ranks_gpu(
    notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, write = staging.copy_tensors, publish.Publisher.publish

    def copied(*arguments: Any) -> None:
        notes.add("copies")
        copy(*arguments)

    def published(*arguments: Any) -> object:
        notes.add("publishes")
        return write(*arguments)

    monkeypatch.setattr(staging, "copy_tensors", copied)
    monkeypatch.setattr(publish.Publisher, "publish", published)
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    with Checkpoints(str(tmp_path / "home"), AppState(network, optimizer), ResumePolicy({})) as checkpoints:
        checkpoints.prepare({})
        checkpoints.save(1, {})
        checkpoints.finish()
        checkpoints.close()
    assert notes.of("checkpoint-copy_0") == [f"GPU {GPU}", "copies"]
    assert notes.of("checkpoint") == [f"GPU {GPU}", "publishes"]


def test_without_a_gpu_nothing_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=AssertionError))
    device_clock.same_gpu()()
