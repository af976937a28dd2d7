"""Steps of a transformer: speed next to a plain loop, memory next to the plan, and no waits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.timed import (
    B1,
    GIB,
    TimedSteps,
    TrainingSize,
    share_of_peak,
    size_for,
    timed_plain_loop,
    timed_training,
)
from slipstream.operations.proofs.gpu.trainings import train, train_transformer, write_tokens
from slipstream.pipeline.train.config import StepProfileConfig, TrainingConfig
from slipstream.pipeline.train.loop import train_loop
from slipstream.pipeline.train.memory.choices import TraceJob
from slipstream.pipeline.train.memory.processes import TraceFailure, trace_footprints
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.results.training import TRACE, read_history, read_operations
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import build_model


def figures_of(context: CheckContext, size: TrainingSize, steps: TimedSteps) -> Iterator[CheckFigure]:
    yield CheckFigure("step", 1e3 * steps.step_s, "ms")
    yield CheckFigure("tokens", steps.tokens_per_s(size), "/s")
    yield CheckFigure("share of peak", 100 * share_of_peak(context, size, steps), "%")


def speed(context: CheckContext, size: TrainingSize | None = None) -> Iterator[CheckFigure]:
    """Time the trainer with documents as in text training, and a plain loop of the same size without."""
    size = size or size_for(context)
    ours = timed_training(context, "trainer", size)
    yield from figures_of(context, size, ours)
    yield CheckFigure("device busy", 100 * ours.device_s / ours.step_s, "% of the step")
    yield CheckFigure("longest step", 1e3 * ours.longest_s, "ms")
    yield CheckFigure("memory", ours.memory / GIB, "GiB")
    plain = timed_plain_loop(context, size)
    yield CheckFigure("plain loop", plain.tokens_per_s(size), "tokens/s")
    yield CheckFigure("of the plain loop", 100 * plain.step_s / ours.step_s, "%")


def large(context: CheckContext) -> Iterator[CheckFigure]:
    size = size_for(context, B1)
    if not context.small and torch.cuda.mem_get_info(context.device)[0] < 40 * GIB:
        raise CannotRun("1.1 billion parameters need 40 GiB")
    yield from speed(context, size)


def documents(context: CheckContext) -> Iterator[CheckFigure]:
    size = size_for(context)
    apart = timed_training(context, "apart", size)
    yield CheckFigure("documents apart", 1e3 * apart.step_s, "ms")
    across = timed_training(context, "across", replace(size, documents=0))
    yield CheckFigure("across documents", 1e3 * across.step_s, "ms")
    yield CheckFigure("speed, of across documents", 100 * across.step_s / apart.step_s, "%")


def deterministic(context: CheckContext) -> Iterator[CheckFigure]:
    size = size_for(context)
    steps = {way: timed_training(context, str(way), size, deterministic=way) for way in (True, False)}
    yield CheckFigure("deterministic", 1e3 * steps[True].step_s, "ms")
    yield CheckFigure("other kernels", 1e3 * steps[False].step_s, "ms")
    yield CheckFigure("cost of determinism", 100 * (steps[True].step_s / steps[False].step_s - 1), "%")


#: Ways of training whose memory is compared with the plan.
WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recompute": {"recompute": "full"},
    "accumulation": {"accumulation": 4},
    "FSDP2": {"parallel": ParallelConfig(shard="weights")},
    "EMA": {"ema": 0.99},
}


def memory(context: CheckContext) -> Iterator[CheckFigure]:
    """Compare ``max_memory_allocated`` with the plan. A CPU has no such figure; there the trainings only run."""
    size = replace(size_for(context), steps=6, settling=2)
    model = ModelConfig("transformer", size.arguments)
    settings = [TrainingConfig(precision="bf16", batch_size=size.rows, **way) for way in WAYS.values()]
    plans = trace_footprints([TraceJob(model, size.signature, each, 1).step for each in settings])
    for (name, way), plan in zip(WAYS.items(), plans, strict=True):
        assert not isinstance(plan, TraceFailure), f"{name}: {plan.reason}"
        yield CheckFigure(f"{name}: plan", plan.peak / GIB, "GiB")
        measured = timed_training(context, name, size, compile=False, **way).memory
        yield CheckFigure(f"{name}: measured", measured / GIB, "GiB")
        yield CheckFigure(f"{name}: plan over measured", 100 * plan.peak / measured, "%")


def profile(context: CheckContext) -> Iterator[CheckFigure]:
    """Profile three steps in a run of their own."""
    size = replace(size_for(context), steps=12)
    tokens = write_tokens(
        context.directory / "tokens", size.rows * size.steps, size.length, size.vocabulary, documents=size.documents
    )
    directory = train(
        context.directory / "model",
        tokens,
        ModelConfig("transformer", size.arguments),
        epochs=1,
        batch_size=size.rows,
        precision="bf16",
        compile="auto",
        profile=StepProfileConfig(steps=3),
    )
    shutil.copy(directory / TRACE, context.kept / TRACE)
    operations = read_operations(directory)
    assert operations, "nothing was profiled"
    yield CheckFigure("a step's time on the device", 1e3 * operations.seconds / operations.steps, "ms")
    calls = sum(each.calls for each in operations.operations) / operations.steps
    yield CheckFigure("calls of a step's longest operations", calls)
    for each in operations.operations[:12]:
        yield CheckFigure(each.name[:60], 100 * each.seconds / operations.seconds, "% of the time")


#: Layers of a 7 B model's kind, narrower.
LORA: dict[str, Any] = {**B1, "num_hidden_layers": 12, "num_attention_heads": 16}


def write_base(directory: Path, size: TrainingSize) -> Path:
    """Write a random base in bf16 with Hugging Face's names."""
    directory.mkdir()
    config = {"model_type": "llama", "vocab_size": size.vocabulary, "max_position_embeddings": size.length}
    config |= {**size.arguments, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    signature = replace(size, documents=0).signature
    network = build_model(ModelConfig("transformer", size.arguments), signature, 0, shapes_alone=True).network
    weights = {name: (0.02 * torch.randn(x.shape)).bfloat16() for name, x in network.state_dict().items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def qlora(context: CheckContext) -> Iterator[CheckFigure]:
    """Train adapters next to a base in bf16, and in four bits."""
    size = replace(size_for(context, LORA), steps=16)
    size = replace(size, rows=min(8, size.rows))
    base = write_base(context.directory / "base", size)
    found = {}
    for held in ("none", "nf4"):
        model = ModelConfig("transformer", base=str(base), lora=LoraConfig(rank=16), quantise=held)
        found[held] = timed_training(context, held, size, model)
        name = "NF4" if held == "nf4" else "bf16"
        yield CheckFigure(f"base in {name}: step", 1e3 * found[held].step_s, "ms")
        yield CheckFigure(f"base in {name}: memory", found[held].memory / GIB, "GiB")
    yield CheckFigure("NF4, of bf16", 100 * found["nf4"].step_s / found["none"].step_s, "% of the time")


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


def no_waits(context: CheckContext) -> Iterator[CheckFigure]:
    """Watch steps with torch's detector (``set_sync_debug_mode``). A CPU has none: there the steps only run."""
    prepared = write_tokens(context.directory / "tokens", 96, documents=4)
    cases = WATCHED if context.device.type == "cpu" else {**WATCHED, **SCALED}
    for name, settings in cases.items():
        with waiting_is_an_error(context) as watched:
            directory = train_transformer(context.directory / name, prepared, epochs=1, batch_size=8, **settings)
        assert math.isfinite(read_history(directory).best.loss)
        yield CheckFigure(name, float(len(watched)), "steps")
