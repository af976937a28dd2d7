"""A linear layer with an adapter: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from slipstream.models.adapters.nf4 import BLOCK, QuantisedProduct, dequantise, quantise
from slipstream.models.arithmetic import autocast_type
from slipstream.models.config import LoraConfig

#: What the names of a layer's trained parameters end with, which are peft's, and those of a weight in four bits.
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
CODES, SCALES = ".codes", ".scales"


class LoraLinear(nn.Module):
    """The frozen linear layer ``base`` plus ``alpha / rank`` times the product of two narrow ones, which are trained:
    ``lora_A`` takes the inputs, of which dropout leaves some out, to ``rank`` numbers, and ``lora_B`` takes these to
    the outputs.

    The frozen weight is ``weight``, or after :meth:`quantise` ``codes`` and ``scales`` (:mod:`.nf4`).
    """

    weight: Tensor
    codes: Tensor
    scales: Tensor

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale = lora.alpha / lora.rank
        self.quantised = False
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, **kind)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, **kind)
        self.dropout = nn.Dropout(lora.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale

    def frozen(self, x: Tensor) -> Tensor:
        """What the layer without its adapter gives."""
        if not self.quantised:
            return functional.linear(x, self.weight, self.bias)
        product = QuantisedProduct.apply(x.to(autocast_type(x)), self.codes, self.scales)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def quantise(self) -> None:
        """Hold the weight in four bits. Its ``in_features`` are a multiple of :data:`.nf4.BLOCK`."""
        assert self.in_features % BLOCK == 0 and not self.quantised
        parts = quantise(self.weight)
        del self.weight
        self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in parts)
        self.quantised = True

    def merged_weight(self) -> Tensor:
        """The weight of the linear layer without adapter that gives the same: ``[out, in]``, in the adapter's type."""
        up, down = self.lora_B.weight.detach(), self.lora_A.weight.detach()
        frozen = dequantise(self.codes, self.scales, up.dtype) if self.quantised else self.weight.detach().to(up.dtype)
        return frozen + self.scale * (up @ down)


def is_adapter(name: str) -> bool:
    """Whether the parameter is one of an adapter."""
    return name.endswith((DOWN, UP))


def initial_std(name: str, size: Sequence[int]) -> float:
    """The standard deviation of an adapter's initial values. An adapter of which one factor is zero adds nothing at
    first."""
    return 1 / math.sqrt(3 * size[1]) if name.endswith(DOWN) else 0.0
