"""Work that the trainer gives a GPU, counted on a CPU: operations, casts, and memory in float32.

    python benchmarks/gpu_readiness.py [OPTIONS]

*step*: the operations of a real training step in bf16, the bytes that they move, and its peak memory, on tensors
without memory. Attention and normalisation are the operators that CUDA would choose
(:func:`slipstream.pipeline.train.memory.tracker.cuda_operators`). Every operation reads each of its tensors once. A
loss needs at least three passes over the logits in bf16. Documents are kept apart by their bounds, or by a mask if a
row has more than 64.

*bars*: these figures next to what was wanted. Element-wise bytes are those outside of matmuls and attention, of a step
whose blocks are compiled: torch compiles a block for this CPU, whose fused kernels count with the tensors that they
read and write. "Before" is of a step without fused loss and compilation, as counted in November 2026.

*loss*: the cross-entropy of a language model's logits in bf16, forward and backward. The trainer computes it in chunks.
The alternatives convert all logits to float32 at once. One keeps their layout. The other transposes them, because
torch's function expects classes in dimension 1; its softmax then runs over a strided dimension. Operations are those
that torch dispatches, without views; CPU time is the median on one core of this machine.

*clipping*: scaling the gradients of a sharded model all at once, as the trainer does, and one tensor at a time.

*forward pass*: a transformer with cached tables of rotary positions, or with tables made in every pass.

*snapshot*: copying the tensors of a checkpoint (weights and two moments of each) to the host's buffer, in one call or
in one call per tensor. A GPU copies tensor by tensor in both cases; only Python's calls are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from harness.command import benchmark
from harness.dispatch import Counted, counted
from harness.inductor import block_of_rows, plain_block
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, settled
from slipstream.pipeline.train.checkpoint.staging import SnapshotBuffers
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.documents import MOST_DOCUMENTS
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.pipeline.train.memory.trace import TracedStep, trace_footprint
from slipstream.pipeline.train.parallel.divide import clip_gradients
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.transformer import kept_tables

COLUMNS = (
    Column("operations", "kernels", "{:.0f}"),
    Column("casts", "casts", "{:.0f}"),
    Column("largest in float32, MiB", "largest", "{:.1f}", 2**20),
    Column("CPU ms", "cpu", "{:.1f}", 1e-3),
)

CALLS = (COLUMNS[0], COLUMNS[-1])

STEP = (
    COLUMNS[0],
    Column("GB", "moved", "{:.1f}", 1e9),
    Column("matmuls", "matmuls", "{:.1f}", 1e9),
    Column("attention", "attention", "{:.1f}", 1e9),
    Column("loss", "loss", "{:.1f}", 1e9),
    Column("loss / least", "ratio", "{:.2f}"),
    Column("casts", "cast", "{:.1f}", 1e9),
    Column("norm, AdamW", "optimizer", "{:.1f}", 1e9),
    Column("other", "other", "{:.1f}", 1e9),
    Column("peak, GiB", "peak", "{:.2f}", 2**30),
)
M125: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "tie_word_embeddings": True,
}
B1: dict[str, object] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
#: Documents of a row that are kept apart.
DOCUMENTS = {"across documents": 0, "2 documents a row": 2, "64 a row": MOST_DOCUMENTS, "a mask": MOST_DOCUMENTS + 1}
#: Arguments, vocabulary and rows of a batch, by model.
MODELS = {"125M": (M125, 50_304, 16), "1.1B": (B1, 32_000, 8)}


def in_pieces(logits: Tensor, target: Tensor) -> Tensor:
    return token_losses(logits.flatten(0, 1), target.flatten())


def as_they_lie(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")


def transposed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().transpose(1, 2), target, reduction="none")


def step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> None:
    torch.autograd.grad(loss(logits, target).sum(), logits)


def traced_step(arguments: Mapping[str, object], vocabulary: int, rows: int, length: int, documents: int) -> Figures:
    """Return the figures of a step; tokens attend within ``documents`` of every row, or with 0 across them."""
    end = 0 if documents else -1
    signature = Signature(
        (TensorSpec("tokens", "int32", (length,)),), "next token", "next", buckets=vocabulary, document_end=end
    )
    training = TrainingConfig(precision="bf16", batch_size=rows)
    step = TracedStep(ModelConfig("transformer", dict(arguments)), signature, training, 1, rows, documents=documents)
    counts = Counted()
    footprint = trace_footprint(step, counts)
    with FakeTensorMode(), Counted() as of_loss:
        logits = torch.empty(rows * length, vocabulary, dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(rows * length, dtype=torch.int64)
        torch.autograd.grad(token_losses(logits, target, fused=True).sum(), logits)
    by_kind = {kind: float(moved - of_loss.moved_by[kind]) for kind, moved in counts.moved_by.items()}
    sums = {"kernels": float(counts.kernels), "moved": float(counts.moved), "peak": float(footprint.peak)}
    return {**sums, **by_kind, "loss": float(of_loss.moved), "ratio": of_loss.moved / (3 * logits.nbytes)}


def steps(quick: bool) -> Table:
    small = {**M125, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    models = {"small": (small, 500, 2)} if quick else MODELS
    length = 32 if quick else 2048
    found = {
        f"{name}, {documents}": traced_step(*model, length, count)
        for name, model in models.items()
        for documents, count in DOCUMENTS.items()
    }
    return Table(f"a step of rows of {length} tokens", STEP, found)


#: Element-wise bytes of a step before: loss, casts, optimiser and others.
BEFORE = {"125M": 147e9, "1.1B": 217e9}
BARS = (Column("found", "found", "{:.2f}"), Column("wanted, at most", "wanted", "{:.2f}"))


def bars(found: Mapping[str, Figures]) -> Table:
    rows: dict[str, Figures] = {}
    for name, (arguments, _, count) in MODELS.items():
        causal, documents = found[f"{name}, across documents"], found[f"{name}, 2 documents a row"]
        rows[f"{name}: bytes of the loss, of the least"] = {"found": causal["ratio"], "wanted": 1.3}
        share = documents["attention"] / causal["attention"]
        rows[f"{name}: attention by documents with scratch, of causal"] = {"found": share, "wanted": 1.1}
        block, layers = block_of_rows(arguments, count * 2048), cast(int, arguments["num_hidden_layers"])
        plain = sum(causal[kind] for kind in ("loss", "cast", "optimizer", "other"))
        compiled = plain - layers * (plain_block(arguments, count, 2048) - block.moved)
        rows[f"{name}: element-wise bytes, of before, not compiled"] = {"found": plain / BEFORE[name], "wanted": 0.6}
        rows[f"{name}: element-wise bytes, of before"] = {"found": compiled / BEFORE[name], "wanted": 0.6}
        rows[f"{name}: fused kernels of a block"] = {"found": float(block.kernels), "wanted": 60.0}
    return Table("bars", BARS, rows)


def clip_one_by_one(parameters: list[nn.Parameter], norm: Tensor, largest: float) -> None:
    factor = (largest / norm).clamp(max=1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(factor.to(parameter.device, parameter.dtype))


def timed(work: Callable[[], object]) -> Figures:
    begun = time.process_time()
    work()
    return {"cpu": time.process_time() - begun}


def figures(works: Mapping[str, Callable[[], object]], turns: int) -> dict[str, Figures]:
    times = in_turns({name: partial(timed, work) for name, work in works.items()}, turns)
    found = {}
    for name, work in works.items():
        counts = counted(work)
        largest = {"largest": float(counts.largest_float32)}
        found[name] = {"kernels": counts.kernels, "casts": counts.casts, **largest, **settled(times[name])}
    return found


def tables_anew(model: Predictor, tokens: Tensor) -> None:
    kept_tables.cache_clear()
    model(tokens)


def one_by_one(buffers: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor, non_blocking=True)


@torch.no_grad()
def done_once(quick: bool) -> Iterator[Table]:
    """Yield tables that compare work done once with work repeated for every pass or tensor."""
    blocks, length = (2, 32) if quick else (12, 512)
    signature = Signature((TensorSpec("tokens", "int64", (length,)),), "next token", "next", buckets=500)
    model = build_model(ModelConfig("transformer", {"num_hidden_layers": blocks}), signature, 0)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    passes: dict[str, Callable[[], object]] = {
        "tables kept": partial(model, tokens),
        "tables recomputed": partial(tables_anew, model, tokens),
    }
    yield calls(f"a forward pass of {blocks} blocks over {length} tokens", passes, quick)
    tensors = {
        f"{part}/{name}": torch.zeros_like(weight)
        for part in ("weight", "first moment", "second moment")
        for name, weight in model.named_parameters()
    }
    staged = SnapshotBuffers(tensors, dict.fromkeys(tensors, 0), 0)
    plain = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    copies: dict[str, Callable[[], object]] = {
        "one call": lambda: staged.stage(tensors, ())(),
        "a call each": partial(one_by_one, plain, tensors),
    }
    yield calls(f"a snapshot of {len(tensors)} tensors", copies, quick)


def calls(title: str, works: Mapping[str, Callable[[], object]], quick: bool) -> Table:
    """Return a table of operations and CPU time.

    The first function runs once before the measurement, to fill caches.
    """
    next(iter(works.values()))()
    found = figures(works, 1 if quick else 5)
    return Table(title, CALLS, {name: {key: each[key] for key in ("kernels", "cpu")} for name, each in found.items()})


@benchmark
def main(quick: bool) -> Iterator[Table]:
    """Compare the trainer's device work with alternatives that cost a GPU more."""
    torch.set_num_threads(1)
    of_steps = steps(quick)
    yield of_steps
    if not quick:  # compilation takes minutes
        torch.set_num_threads(2)
        yield bars(cast("Mapping[str, Figures]", of_steps.rows))
        torch.set_num_threads(1)
    turns = 1 if quick else 5
    rows, length, tokens = (2, 32, 500) if quick else (8, 512, 32_000)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, length, tokens, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, tokens, (rows, length), generator=generator)
    ways = {"in pieces": in_pieces, "as they lie": as_they_lie, "transposed": transposed}
    works = {name: partial(step, loss, logits, target) for name, loss in ways.items()}
    yield Table(f"loss of {rows} rows of {length} tokens, vocabulary {tokens:,}", COLUMNS, figures(works, turns))
    parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in range(20 if quick else 300)]
    for parameter in parameters:
        parameter.grad = torch.randn(64, 64, generator=generator)
    norm = torch.tensor(1e3, dtype=torch.float64)
    clips = {"at once": clip_gradients, "one by one": clip_one_by_one}
    works = {name: partial(way, parameters, norm, 1e3) for name, way in clips.items()}
    yield Table(f"clipping of {len(parameters)} gradients", COLUMNS, figures(works, turns))
    yield from done_once(quick)


if __name__ == "__main__":
    main()
