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

from slipstream.operations.proofs.gpu.check import CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER, train, train_transformer, write_tokens
from slipstream.pipeline.train.config import StepProfileConfig
from slipstream.pipeline.train.loop import train_loop
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.results.training import TRACE, read_attempt, read_history, read_operations
from slipstream.shared.models.config import ModelConfig

GIB = 1 << 30
#: 271 million parameters: large enough for matmuls that fill a GPU, small enough to be written in seconds.
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
class TransformerSize:
    """Transformer, the length and vocabulary of its rows, and the rows of a step."""

    arguments: dict[str, Any]
    length: int
    vocabulary: int
    rows: int


def size_for(context: CheckContext) -> TransformerSize:
    if context.small:
        return TransformerSize(SMALL_TRANSFORMER, 64, 256, 4)
    # A row takes about 0.8 GiB, mostly for the logits and the gated layers.
    free, _ = torch.cuda.mem_get_info(context.device)
    return TransformerSize(LARGE_TRANSFORMER, LONG, WIDE, max(1, min(16, int(free / GIB / 2))))


def speed(context: CheckContext) -> Iterator[CheckFigure]:
    """Train in bf16 with all that fault tolerance needs; the figures are the trainer's, over all steps."""
    size, steps = size_for(context), 12 if context.small else STEPS
    prepared = write_tokens(context.directory / "tokens", size.rows * steps, size.length, size.vocabulary)
    directory = train(
        context.directory / "model",
        prepared,
        ModelConfig("transformer", size.arguments),
        epochs=1,
        batch_size=size.rows,
        precision="bf16",
        learning_rate=2e-3 if context.small else 5e-4,
        profile=StepProfileConfig(steps=3),
    )
    history, operations = read_history(directory), read_operations(directory)
    figures = read_attempt(directory).throughput
    assert history.steps_total == steps and figures and operations
    assert history.steps[-1].loss < history.steps[0].loss, "the loss does not fall"
    yield CheckFigure("parameters", history.parameters / 1e6, "M")
    yield CheckFigure("share of peak", 100 * figures.utilisation, f"% ({figures.peak_from})")
    yield CheckFigure("tokens", figures.tokens_per_s or 0.0, "/s")
    yield CheckFigure("memory", figures.memory_bytes / GIB, "GiB")
    for operation in operations.operations[:5]:
        yield CheckFigure(operation.name[:60], 100 * operation.seconds / operations.seconds, "% of the time")
    shutil.copy(directory / TRACE, context.kept / TRACE)


#: Trainings to watch, by their settings.
WATCHED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "clip_norm": 1.0},
    "fp32, EMA": {"precision": "fp32", "ema": 0.9},
    "FSDP2": {"precision": "bf16", "parallel": ParallelConfig(shard="weights")},
}
#: On a GPU only.
SCALED: dict[str, dict[str, Any]] = {"fp16": {"precision": "fp16"}}
#: First steps, in which torch and its libraries initialise.
SETTLING = 4


@contextmanager
def waiting_is_an_error(context: CheckContext) -> Iterator[list[int]]:
    """Let torch raise if a step makes the host wait for the GPU; yield the numbers of the watched steps."""
    original, passed, watched = train_loop.train_step, 0, list[int]()

    def step(*arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed <= SETTLING:
            return original(*arguments)
        watched.append(passed)
        if context.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*arguments)
        finally:
            if context.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(train_loop, "train_step", step):
        yield watched


def no_waits(context: CheckContext) -> Sequence[CheckFigure]:
    """Watch steps with torch's detector (``set_sync_debug_mode``). A CPU has none: there the steps only run."""
    prepared, found = write_tokens(context.directory / "tokens", 96), []
    cases = WATCHED if context.device.type == "cpu" else {**WATCHED, **SCALED}
    for name, settings in cases.items():
        with waiting_is_an_error(context) as watched:
            directory = train_transformer(context.directory / name, prepared, epochs=1, batch_size=8, **settings)
        assert len(watched) == 12 - SETTLING and math.isfinite(read_history(directory).best.loss)
        found.append(CheckFigure(name, float(len(watched)), "steps"))
    return found
