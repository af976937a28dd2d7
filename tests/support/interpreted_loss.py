"""The fused loss and its reference, run by Triton's interpreter: ``TRITON_INTERPRET=1 python -m`` this module.

Prints a JSON object of the largest differences, and of the bytes that the kernels load and store."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from slipstream.pipeline.train.loop.objective import token_losses

INF, NAN = float("inf"), float("nan")
#: Rows of three logits; the label is the second.
EXTREMES = (
    [INF, 1, 2],
    [-INF, 1, 2],
    [1, -INF, -INF],
    [-INF] * 3,
    [NAN, 1, 2],
    [1, NAN, 2],
    [INF, -INF, 0],
    [1, INF, 2],
)


def both(logits: Tensor, target: Tensor, smoothing: float, upstream: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Losses and gradients of the kernels and of the reference."""
    found = []
    for fused in (True, False):
        leaf = logits.clone().requires_grad_()
        losses = token_losses(leaf, target, smoothing, fused=fused)
        (gradient,) = torch.autograd.grad(losses, leaf, upstream)
        assert gradient.dtype == logits.dtype and losses.dtype == torch.float32
        found.append((losses.detach(), gradient))
    return found


def difference(dtype: torch.dtype, smoothing: float, vocabulary: int) -> list[float]:
    """The largest differences of losses and gradients, and if tokens without upstream gradient have none."""
    draw = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(5, vocabulary + 3, generator=draw)).to(dtype)[:, :vocabulary]  # not contiguous
    target = torch.randint(0, vocabulary, (5,), generator=draw)
    upstream = torch.tensor([1.0, -2.5, 0.0, 1e-3, 0.7])  # the third token is not learned
    (losses, gradient), (reference, slope) = both(logits, target, smoothing, upstream)
    return [
        float((losses - reference).abs().max()),
        float((gradient.double() - slope.double()).abs().max()),
        float(gradient[2].abs().max()),
    ]


def extremes(smoothing: float) -> float:
    """The largest difference where both are finite; fails where only one is."""
    logits, target = torch.tensor(EXTREMES), torch.ones(len(EXTREMES), dtype=torch.int64)
    found, expected = both(logits, target, smoothing, torch.ones(len(logits)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-6, atol=1e-6)
    return max(float((a - b).nan_to_num(0, 0, 0).abs().max()) for a, b in zip(found, expected, strict=True))


def moved_over_least(tokens: int, vocabulary: int) -> float:
    """The bytes that both passes load and store, over three passes over the logits in bf16."""
    moved = 0

    def counting(plain: Callable[..., Any], position: int) -> Callable[..., Any]:
        def counted(self: Any, *arguments: Any) -> Any:
            nonlocal moved
            made = plain(self, *arguments)
            mask = arguments[position]
            of = made if made is not None else arguments[1]
            moved += int(mask.data.sum()) * of.data.dtype.itemsize
            return made

        return counted

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, counting(getattr(InterpreterBuilder, name), position))
    logits = torch.randn(tokens, vocabulary).bfloat16().requires_grad_()
    losses = token_losses(logits, torch.zeros(tokens, dtype=torch.int64), fused=True)
    torch.autograd.grad(losses.sum(), logits)
    return moved / (3 * logits.nbytes)


def main() -> None:
    kinds = product((torch.float32, torch.bfloat16, torch.float16), (0.0, 0.1), (1, 7, 50, 5000))
    found: dict[str, object] = {
        f"{dtype} {smoothing} {v}": difference(dtype, smoothing, v) for dtype, smoothing, v in kinds
    }
    logits = torch.randn(3, 9)
    again = [both(logits, torch.tensor([0, 8, 4]), 0.1, torch.ones(3))[0] for _ in range(2)]
    found["equal bits"] = all(torch.equal(a, b) for a, b in zip(*again, strict=True))
    found["extremes"] = [extremes(0.0), extremes(0.1)]
    found["moved over least"] = moved_over_least(6, 3000)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
