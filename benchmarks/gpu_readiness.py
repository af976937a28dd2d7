"""What a GPU would be asked for, counted without one: operations, casts, and memory in float32.

    python benchmarks/gpu_readiness.py [--quick] [--json FILE]

*loss*: the cross-entropy of a language model's logits in bf16, forwards and backwards: in pieces, as the trainer takes
it; of the logits as they lie, in float32; and transposed, as torch's own function wants the classes second, which takes
the softmax over numbers that do not lie beside each other. Operations are what torch dispatches, without views;
processor time is that of one core here, medians of runs in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from harness.command import benchmark
from harness.dispatch import counted
from harness.table import Column, Table
from harness.turns import Figures, in_turns, settled
from slipstream.train.loop.token_loss import token_losses

COLUMNS = (
    Column("operations", "kernels", "{:.0f}"),
    Column("casts", "casts", "{:.0f}"),
    Column("largest in float32, MiB", "largest", "{:.1f}", 2**20),
    Column("CPU ms", "cpu", "{:.1f}", 1e-3),
)


def in_pieces(logits: Tensor, target: Tensor) -> Tensor:
    return token_losses(logits.flatten(0, 1), target.flatten())


def as_they_lie(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")


def transposed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().transpose(1, 2), target, reduction="none")


def step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> None:
    torch.autograd.grad(loss(logits, target).sum(), logits)


def timed(work: Callable[[], object]) -> Figures:
    begun = time.process_time()
    work()
    return {"cpu": time.process_time() - begun}


@benchmark
def main(quick: bool) -> Iterator[Table]:
    """The loss of a language model, beside two that a GPU would pay more for."""
    torch.set_num_threads(1)
    rows, length, tokens = (2, 32, 500) if quick else (8, 512, 32_000)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, length, tokens, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, tokens, (rows, length), generator=generator)
    ways = {"in pieces": in_pieces, "as they lie": as_they_lie, "transposed": transposed}
    works = {name: partial(step, loss, logits, target) for name, loss in ways.items()}
    times = in_turns({name: partial(timed, work) for name, work in works.items()}, 1 if quick else 5)
    figures = {}
    for name, work in works.items():
        counts = counted(work)
        largest = {"largest": float(counts.largest_float32)}
        figures[name] = {"kernels": counts.kernels, "casts": counts.casts, **largest, **settled(times[name])}
    yield Table(f"loss of {rows} rows of {length} tokens, vocabulary {tokens:,}", COLUMNS, figures)


if __name__ == "__main__":
    main()
