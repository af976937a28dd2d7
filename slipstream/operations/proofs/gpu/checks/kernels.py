"""Kernels by themselves: the device's bandwidth and matmuls, attention by documents, and the loss of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.operations.proofs.gpu.check import CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.timed import seconds_on_device
from slipstream.pipeline.train.checks import why_not_fused
from slipstream.pipeline.train.documents import DocumentLayout, kernel_takes_documents
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.shared.models.token_rows import attention_mask
from slipstream.shared.models.transformer import attend_within


def kernels(context: CheckContext) -> Iterator[CheckFigure]:
    device, small = context.device, context.small
    number = 1 << (22 if small else 30)
    one, other = (torch.randint(0, 255, (number,), dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * number / seconds_on_device(context, partial(one.copy_, other))
    yield CheckFigure("copy on the device, read and written", bandwidth / 1e12, "TB/s")
    side = 256 if small else 8192
    x, y = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield CheckFigure(
        "bf16 matmul", 2 * side**3 / seconds_on_device(context, partial(torch.matmul, x, y)) / 1e12, "TFLOP/s"
    )
    del one, other, x, y
    yield from attention(context)
    yield from loss(context, bandwidth)


def passes(attend: Callable[..., Tensor], heads: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the outputs and the gradients of query, key and value, all ``[batch, length, heads, size]``."""
    leaves = [each.detach().requires_grad_() for each in heads]
    outputs = attend(*leaves)
    return [outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention by a mask, or causal attention."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def attention(context: CheckContext) -> Iterator[CheckFigure]:
    """Compare attention by documents with a mask in float32, and its time with causal attention."""
    device = context.device
    rows, length, count, size = (2, 64, 2, 16) if context.small else (8, 2048, 12, 64)
    draw = torch.Generator(device=device).manual_seed(0)
    shape = (rows, length, count, size)
    *heads, upstream = (torch.randn(shape, generator=draw, device=device).bfloat16() for _ in range(4))
    ids = torch.ones(rows, length, dtype=torch.int64)
    ids[:, length // 3], ids[0, length // 2] = 0, 0
    mask = attention_mask(ids.to(device), 0)
    exact = passes(partial(masked, mask=mask), [each.float() for each in heads], upstream.float())
    apart = partial(masked, mask=mask)
    if kernel_takes_documents(device, "bf16"):
        bounds = DocumentLayout(0, length, rows, 1).bounds(ids.numpy())
        assert bounds is not None
        apart = partial(attend_within, documents=torch.from_numpy(bounds[0]).to(device))
    found = passes(apart, heads, upstream)
    worst = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))
    yield CheckFigure("attention by documents: error", worst, "of the largest")
    torch.use_deterministic_algorithms(True)
    found, again = (passes(apart, heads, upstream) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    different = sum(not torch.equal(a, b) for a, b in zip(found, again, strict=True))
    yield CheckFigure("attention by documents: tensors that differ when repeated", float(different))
    ways: dict[str, Callable[..., Tensor]] = {
        "documents": apart,
        "causal": masked,
        "a mask": partial(masked, mask=mask),
    }
    times = {name: seconds_on_device(context, partial(passes, way, heads, upstream)) for name, way in ways.items()}
    for name, seconds in times.items():
        yield CheckFigure(f"attention, {name}", 1e3 * seconds, "ms")
    yield CheckFigure("attention by documents, of causal", 100 * times["documents"] / times["causal"], "% of the time")


def loss(context: CheckContext, bandwidth: float) -> Iterator[CheckFigure]:
    """Compare the fused loss with the reference in float64, and its time with that of the least bytes."""
    device, fused = context.device, not why_not_fused(context.device)
    tokens, vocabulary = (64, 1000) if context.small else (16_384, 50_304)
    draw = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(tokens, vocabulary, generator=draw, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), generator=draw, device=device)

    def passed(fused: bool) -> list[Tensor]:
        losses = token_losses(logits, target, fused=fused)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), logits)]

    (losses, gradient), again = passed(fused), passed(fused)
    part = slice(0, 256)
    exact = logits[part].detach().double().requires_grad_()
    expected = functional.cross_entropy(exact, target[part], reduction="none")
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    yield CheckFigure("loss: error", float((losses[part] - expected.detach()).abs().max()))
    yield CheckFigure("gradient of the loss: error", float((gradient[part] - slope).abs().max()))
    same = torch.equal(losses, again[0]) and torch.equal(gradient, again[1])
    yield CheckFigure("loss: passes that differ when repeated", float(not same))
    least = 3 * logits.nbytes / bandwidth
    seconds = seconds_on_device(context, partial(passed, fused), 10)
    yield CheckFigure("loss", 1e3 * seconds, "ms")
    yield CheckFigure("loss, reference", 1e3 * seconds_on_device(context, partial(passed, False), 10), "ms")
    yield CheckFigure("loss, over the time of its least bytes", seconds / least, "x")
