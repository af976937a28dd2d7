"""Weights in four bits: equal to bitsandbytes' bytes, and passes keep no more than these."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from slipstream.shared.models.adapters.nf4 import BLOCK, LEVELS, QuantisedMatmul, dequantise_weight, quantise_weight


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def extreme() -> Tensor:
    """Blocks of zeros, of denormal and of huge numbers, with one outlier, of one sign, and at the middles of levels."""
    levels = torch.tensor(LEVELS)
    middles = torch.cat([(levels[:-1] + levels[1:]) / 2, torch.tensor([1.0])]).repeat(4)
    ramp = torch.linspace(-1, 1, BLOCK)
    outlier = torch.full((BLOCK,), 1e-6).index_fill_(0, torch.tensor([7]), -3e4)
    blocks = [torch.zeros(BLOCK), -torch.zeros(BLOCK), ramp * 1e-41, ramp * 1e-38, ramp * 3e38, outlier, ramp.abs()]
    blocks += [torch.nextafter(middles, torch.tensor(s * 9.0)) * f for s in (-1, 1) for f in (1.0, 0.37)]
    return torch.stack([*blocks, middles]).view(4, -1)


WEIGHTS = {
    "one block": drawn(1, 64),
    "odd rows": drawn(7, 192, 1),
    "wide": drawn(16, 1024, 2),
    "tall": drawn(1000, 128, 3),
    "extreme": extreme(),
    "rows of zeros": torch.zeros(3, 128),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_the_bytes_are_those_of_bitsandbytes(weight: Tensor) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    theirs, state = bitsandbytes.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    ours = quantise_weight(weight)
    assert ours.codes.dtype == torch.uint8 and ours.codes.shape == (len(weight), weight.shape[1] // 2)
    assert ours.codes.flatten().tolist() == theirs.flatten().tolist()
    scales = ours.scales.view(torch.float32)
    assert scales.shape == (len(weight), weight.shape[1] // BLOCK)
    assert torch.equal(scales.flatten(), state.absmax)
    assert torch.equal(dequantise_weight(*ours, torch.float32), bitsandbytes.dequantize_4bit(theirs, state))


def test_a_weight_takes_four_and_a_half_bits() -> None:
    codes, scales = quantise_weight(drawn(256, 512))
    assert 8 * (codes.nbytes + scales.nbytes) == 4.5 * 256 * 512


def test_rows_are_quantised_by_themselves() -> None:
    whole = quantise_weight(weight := drawn(10, 256))
    parts = [quantise_weight(weight[start:stop]) for start, stop in ((0, 3), (3, 7), (7, 10))]
    for number in range(2):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_and_gradients_are_those_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    parts = quantise_weight(drawn(96, 128))
    x = drawn(5, 128, 4).mul(50).to(dtype).requires_grad_()
    plain = x.detach().clone().requires_grad_()
    theirs = functional.linear(plain, dequantise_weight(*parts, dtype))
    ours = QuantisedMatmul.apply(x, *parts)
    assert ours.dtype == dtype and torch.equal(ours, theirs)
    for outputs in (ours, theirs):
        (outputs.float() ** 2).sum().backward()
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


def test_the_backward_pass_keeps_the_four_bits_alone() -> None:
    codes, scales = quantise_weight(drawn(256, 128))
    kept = dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    x = drawn(3, 128).requires_grad_()
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = functional.silu(x)
        out = QuantisedMatmul.apply(hidden, codes, scales)
    assert kept == {tensor.data_ptr(): tensor.nbytes for tensor in (x, codes, scales)}
    out.sum().backward()


def test_without_a_gradient_to_give_nothing_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.shared.models.adapters import nf4

    x, beside = drawn(3, 128), torch.zeros(3, 96, requires_grad=True)
    parts = quantise_weight(drawn(96, 128))
    outputs = QuantisedMatmul.apply(x, *parts) + beside
    monkeypatch.setattr(nf4, "dequantise_weight", None)
    outputs.sum().backward()
    assert beside.grad is not None
