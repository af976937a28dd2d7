"""Steps of a transformer: utilisation of the device, and no waits for it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from slipstream.artifacts.results.training import TRACE, read_attempt, read_history, read_operations
from slipstream.models.config import ModelConfig
from slipstream.train.config import StepProfileConfig
from slipstream.train.loop import train_loop
from slipstream.train.parallel.config import ParallelConfig
from tests.support.gpu_proof.check import Figure, Place
from tests.support.gpu_proof.trainings import SMALL_TRANSFORMER, train, train_transformer, write_tokens

GIB = 1 << 30
#: 271 million parameters: large enough for its products to fill a GPU, small enough to be written in seconds.
LARGE_TRANSFORMER = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
LONG, WIDE = 2048, 32_000
STEPS = 60


@dataclass(frozen=True)
class Size:
    """A transformer, its rows, and how many of them a step takes."""

    arguments: dict[str, Any]
    length: int
    vocabulary: int
    rows: int


def size_for(place: Place) -> Size:
    if place.small:
        return Size(SMALL_TRANSFORMER, 64, 256, 4)
    # Of what a row takes most is for the logits and the gated layers: about 0.8 GiB.
    free, _ = torch.cuda.mem_get_info(place.device)
    return Size(LARGE_TRANSFORMER, LONG, WIDE, max(1, min(16, int(free / GIB / 2))))


def speed(place: Place) -> Iterator[Figure]:
    """In bf16, by the trainer with all that survival needs; the figures are its own, over all steps."""
    size, steps = size_for(place), 12 if place.small else STEPS
    prepared = write_tokens(place.directory / "tokens", size.rows * steps, size.length, size.vocabulary)
    directory = train(
        place.directory / "model",
        prepared,
        ModelConfig("transformer", size.arguments),
        epochs=1,
        batch_size=size.rows,
        precision="bf16",
        learning_rate=2e-3 if place.small else 5e-4,
        profile=StepProfileConfig(steps=3),
    )
    history, operations = read_history(directory), read_operations(directory)
    figures = read_attempt(directory).throughput
    assert history.steps_total == steps and figures and operations
    assert history.steps[-1].loss < history.steps[0].loss, "the loss does not fall"
    yield Figure("parameters", history.parameters / 1e6, "M")
    yield Figure("share of peak", 100 * figures.utilisation, f"% ({figures.peak_from})")
    yield Figure("tokens", figures.tokens_per_s or 0.0, "/s")
    yield Figure("memory", figures.memory_bytes / GIB, "GiB")
    for operation in operations.operations[:5]:
        yield Figure(operation.name[:60], 100 * operation.seconds / operations.seconds, "% of the time")
    shutil.copy(directory / TRACE, place.kept / TRACE)


#: What is watched, by the settings of training.
WATCHED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "clip_norm": 1.0},
    "fp32, EMA": {"precision": "fp32", "ema": 0.9},
    "FSDP2": {"precision": "bf16", "parallel": ParallelConfig(shard="weights")},
}
#: On a GPU only.
SCALED: dict[str, dict[str, Any]] = {"fp16": {"precision": "fp16"}}
#: Steps in which torch and its libraries set themselves up.
SETTLING = 4


@contextmanager
def waiting_is_an_error(place: Place) -> Iterator[list[int]]:
    """Has torch raise wherever a step makes the host wait for the GPU; gives the steps that were watched."""
    original, passed, watched = train_loop.train_step, 0, list[int]()

    def step(*arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed <= SETTLING:
            return original(*arguments)
        watched.append(passed)
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*arguments)
        finally:
            if place.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(train_loop, "train_step", step):
        yield watched


def no_waits(place: Place) -> Sequence[Figure]:
    """By torch's own detector (``set_sync_debug_mode``), which a CPU does not have: there the steps only run."""
    prepared, found = write_tokens(place.directory / "tokens", 96), []
    cases = WATCHED if place.device.type == "cpu" else {**WATCHED, **SCALED}
    for name, settings in cases.items():
        with waiting_is_an_error(place) as watched:
            directory = train_transformer(place.directory / name, prepared, epochs=1, batch_size=8, **settings)
        assert len(watched) == 12 - SETTLING and math.isfinite(read_history(directory).best.loss)
        found.append(Figure(name, float(len(watched)), "steps"))
    return found
