"""Timed training steps of a transformer: by the trainer, and by a plain compiled loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.operations.proofs.gpu.check import CheckContext
from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER, train, write_tokens
from slipstream.pipeline.train import run
from slipstream.pipeline.train.device_clock import device_clock, largest_memory, measured_peak
from slipstream.pipeline.train.fault_tolerance.guard import Guard, StepTiming
from slipstream.pipeline.train.loop.probe import training_flops
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results.ledger import STALL
from slipstream.shared.machine.gpus import data_sheet_peak
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.transformer import rotary_tables
from slipstream.shared.models.transformer_config import TransformerConfig

GIB = 1 << 30
M125: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "tie_word_embeddings": True,
}
B1: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class TrainingSize:
    """Transformer with ``arguments``, and the rows of its steps; the first ``settling`` steps do not count."""

    arguments: dict[str, Any]
    vocabulary: int
    rows: int
    length: int = 2048
    steps: int = 38
    settling: int = 8
    #: Documents of a row that are kept apart; 0 if attention crosses them.
    documents: int = 4

    @property
    def signature(self) -> Signature:
        tokens = (TensorSpec("tokens", "int64", (self.length,)),)
        end = 0 if self.documents else -1
        return Signature(tokens, "next token", "next token", buckets=self.vocabulary, document_end=end)


def size_for(context: CheckContext, arguments: dict[str, Any] = M125) -> TrainingSize:
    """Return the size of a training that fits into the free memory; on a CPU that of a rehearsal."""
    if context.small:
        return TrainingSize(SMALL_TRANSFORMER, 256, 4, length=64, steps=8, settling=3)
    free = torch.cuda.mem_get_info(context.device)[0] / GIB
    if arguments is not B1:
        return TrainingSize(arguments, 50_304, max(1, min(16, int(free / 1.5))))
    return TrainingSize(B1, 32_000, max(1, min(8, int((free - 20) / 4))), steps=20)


@dataclass(frozen=True)
class TimedSteps:
    """Median seconds of a step and of its work on the device, the longest step, stalls of saves, and peak memory."""

    step_s: float
    device_s: float = 0.0
    longest_s: float = 0.0
    stall_s: float = 0.0
    memory: int = 0

    def tokens_per_s(self, size: TrainingSize) -> float:
        return size.rows * size.length / self.step_s


def share_of_peak(context: CheckContext, size: TrainingSize, steps: TimedSteps) -> float:
    """Return the model's FLOPs as a fraction of what the device computes in bf16, by its data sheet if known."""
    network = build_model(ModelConfig("transformer", size.arguments), size.signature, 0, shapes_alone=True).network
    flops = training_flops(network, size.signature) or 0
    name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    peak = data_sheet_peak(name, "bf16") or measured_peak(context.device, "bf16")
    return size.rows * flops / steps.step_s / peak


def timed_training(
    context: CheckContext, name: str, size: TrainingSize, model: ModelConfig | None = None, **settings: Any
) -> TimedSteps:
    """Train for an epoch in bf16 with the trainer's defaults but for ``settings``; no model is written.

    ``model`` is fresh by default.
    """
    began, device, stall, finished = list[float](), list[float](), 0.0, Guard.finished

    def noting(self: Guard, step: int, timing: StepTiming) -> None:
        nonlocal stall
        finished(self, step, timing)
        at = timing.wait()
        began.append(at.begin)
        device.append(at.end - at.begin)
        stall = self.recorder.record.seconds[STALL]

    directory = context.directory / name
    tokens = directory / "tokens"
    directory.mkdir()
    write_tokens(tokens, size.rows * size.steps, size.length, size.vocabulary, documents=size.documents)
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(context.device)
    defaults = {"epochs": 1, "batch_size": size.rows, "precision": "bf16", "learning_rate": 3e-4, "compile": "auto"}
    with mock.patch.object(Guard, "finished", noting), mock.patch.object(run, "write_trained", lambda *_: None):
        train(
            directory / "model",
            tokens,
            model or ModelConfig("transformer", size.arguments),
            **{**defaults, "evaluate_every": 10**6, **settings},
        )
    gaps = [after - before for before, after in pairwise(began[size.settling :])]
    busy = statistics.median(device[size.settling :])
    return TimedSteps(statistics.median(gaps), busy, max(gaps), stall, largest_memory(context.device))


class PlainLayer(nn.Module):
    """Layer of a Llama, as an engineer would write it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, inner, self.size = config.hidden_size, config.intermediate_size, config.head_size
        self.heads, self.shared = config.num_attention_heads, config.key_value_heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.shared) * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (-1, self.size))
        q, k, v = heads.split([self.heads, self.shared, self.shared], 2)
        q, k = ((y * cosine + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sine) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads > self.shared)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class PlainModel(nn.Module):
    """Llama of the size of a training; its forward pass returns the mean loss of ids ``[batch, length + 1]``."""

    def __init__(self, size: TrainingSize) -> None:
        super().__init__()
        given = {"vocab_size": size.vocabulary, "max_position_embeddings": size.length, **size.arguments}
        config = TransformerConfig.from_dict(given)
        self.embed = nn.Embedding(size.vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.head = (
            nn.RMSNorm(config.hidden_size),
            nn.Linear(config.hidden_size, size.vocabulary, bias=False),
        )
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        for parameter in (p for p in self.parameters() if p.ndim > 1):
            nn.init.normal_(parameter, 0, 0.02)
        tables = rotary_tables(config, size.length, torch.device("cpu"), torch.bfloat16)
        self.cosine, self.sine = (nn.Buffer(table, persistent=False) for table in tables)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1]).bfloat16()
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.loss(x, ids[:, 1:])

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())

    def compile_parts(self) -> None:
        """Compile layers and loss, not the whole, which would take a minute."""
        for layer in self.layers:
            layer.compile()
        self.loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(self.loss)  # type: ignore[method-assign]


def timed_plain_loop(context: CheckContext, size: TrainingSize) -> TimedSteps:
    """Time a loop without documents, checkpoints, checks or determinism, over rows that are already on the device."""
    torch.manual_seed(0)
    device, clock = context.device, device_clock(context.device)
    model = PlainModel(size).to(device)
    if device.type == "cuda":
        model.compile_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = torch.randint(1, size.vocabulary, (4 * size.rows, size.length + 1), device=device)
    marks = []
    for step in range(size.steps):
        marks.append(clock.mark())
        batch = rows[step % 4 * size.rows : (step % 4 + 1) * size.rows]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    times = [mark.wait() for mark in marks][size.settling :]
    assert loss.isfinite(), "the plain loop's loss is not finite"
    return TimedSteps(statistics.median(after - before for before, after in pairwise(times)))


def seconds_on_device(context: CheckContext, work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of ``work`` on the device, after three runs of warm-up."""
    clock, times = device_clock(context.device), []
    for _ in range(3 + (2 if context.small else repeats)):
        before = clock.mark()
        work()
        times.append((before, clock.mark()))
    return statistics.median(after.wait() - before.wait() for before, after in times[3:])
