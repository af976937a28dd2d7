"""The loss of tokens, in chunks: the numbers of the whole, without its memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.pipeline.train.loop import objective
from slipstream.pipeline.train.loop.objective import loss_sum
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec

ROWS, LENGTH, TOKENS = 3, 20, 50
SIGNATURE = Signature((TensorSpec("tokens", "int32", (LENGTH,)),), "next token", "", tuple(map(str, range(TOKENS))))


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, LENGTH, TOKENS, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)


class Largest(TorchDispatchMode):
    """Notes the largest float32 tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                self.numbers = max(self.numbers, each.numel())
        return made


@contextmanager
def pieces_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(objective, "PIECE", rows * TOKENS)
        yield


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_it_is_the_mean_cross_entropy_of_each_rows_tokens(
    rows: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = example(torch.float32)
    weight = torch.tensor([1.0, 0.0, 2.5])
    with pieces_of(rows, monkeypatch):
        loss = loss_sum(SIGNATURE, logits, target, smoothing, weight)
    (gradient,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    each = functional.cross_entropy(exact.transpose(1, 2), target, reduction="none", label_smoothing=smoothing)
    expected = (each.mean(dim=1) * weight.double()).sum()
    (slope,) = torch.autograd.grad(expected, exact)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(gradient.double(), slope, rtol=1e-5, atol=1e-8)
    assert not gradient[1].any(), "padding has weight 0"


def test_logits_in_bf16_are_never_whole_in_float32_and_lose_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = example(torch.bfloat16)
    with pieces_of(7, monkeypatch), Largest() as largest:
        loss = loss_sum(SIGNATURE, logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert 7 * TOKENS == largest.numbers < logits.numel()
    exact = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(exact.transpose(1, 2), target, reduction="none").mean(dim=1).sum()
    (slope,) = torch.autograd.grad(expected, exact)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # Rounded to bf16 when it is made and when it is scaled: at most two halves of its last place.
    assert gradient.dtype == torch.bfloat16
    assert ((gradient.double() - slope).abs() <= slope.abs() * 2**-7).all()


def test_without_a_gradient_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = example(torch.bfloat16)
    with torch.no_grad(), pieces_of(1, monkeypatch), Largest() as largest:
        loss_sum(SIGNATURE, logits, target)
    assert largest.numbers <= ROWS * LENGTH


def test_a_logit_that_is_not_finite_makes_its_row_so() -> None:
    logits, target = example(torch.float32)
    with torch.no_grad():
        logits[1, 4, 9] = torch.nan
    losses = [loss_sum(SIGNATURE, logits[row : row + 1], target[row : row + 1]) for row in range(ROWS)]
    assert [loss.isfinite().item() for loss in losses] == [True, False, True]
    (gradient,) = torch.autograd.grad(losses[1], logits)
    assert not gradient[1, 4].isfinite().any() and gradient[1, :4].isfinite().all()


def test_a_schedule_may_go_back_twice() -> None:
    logits, target = example(torch.float32)
    loss = loss_sum(SIGNATURE, logits, target)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)
