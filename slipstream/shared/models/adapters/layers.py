"""Linear layer with an adapter (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models")."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from slipstream.shared.models.adapters.nf4 import BLOCK, QuantisedMatmul, dequantise_weight, quantise_weight
from slipstream.shared.models.arithmetic import autocast_type
from slipstream.shared.models.config import LoraConfig

#: Name suffixes of an adapter's trained parameters, as in peft.
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
#: Name suffixes of the two tensors that store a weight in four bits.
CODES, SCALES = ".codes", ".scales"


class LoraLinear(nn.Module):
    """Frozen linear layer plus a trained low-rank update.

    The output is that of ``base`` plus ``alpha / rank`` times ``lora_B(lora_A(dropout(x)))``. ``lora_A`` maps the
    inputs to ``rank`` numbers, ``lora_B`` maps these to the outputs.

    The frozen weight is ``weight``; after :meth:`quantise` it is ``codes`` and ``scales`` (:mod:`.nf4`).
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
        frozen = self.frozen(x)
        # Adapters are float32, the frozen weights may not be. Autocast computes both in one type.
        adapted = self.lora_B(self.lora_A(self.dropout(x).to(autocast_type(self.lora_A.weight))))
        return frozen + (adapted * self.scale).to(frozen.dtype)

    def frozen(self, x: Tensor) -> Tensor:
        """Return the output of the layer without its adapter."""
        if not self.quantised:
            return functional.linear(x, self.weight, self.bias)
        product = QuantisedMatmul.apply(x.to(autocast_type(x)), self.codes, self.scales)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def quantise(self) -> None:
        """Store the frozen weight in four bits; ``in_features`` must be a multiple of :data:`.nf4.BLOCK`."""
        assert self.in_features % BLOCK == 0 and not self.quantised
        parts = quantise_weight(self.weight)
        del self.weight
        self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in parts)
        self.quantised = True

    def merged_weight(self) -> Tensor:
        """Return the frozen weight plus the adapter's update, ``[out, in]``, in the adapter's type."""
        up, down = self.lora_B.weight.detach(), self.lora_A.weight.detach()
        frozen = (
            dequantise_weight(self.codes, self.scales, up.dtype)
            if self.quantised
            else self.weight.detach().to(up.dtype)
        )
        return frozen + self.scale * (up @ down)


def is_adapter(name: str) -> bool:
    """Return True if ``name`` is that of an adapter's parameter."""
    return name.endswith((DOWN, UP))


def initial_std(name: str, size: Sequence[int]) -> float:
    """Return the standard deviation of an adapter's initial values.

    It is 0 for ``lora_B``, so that a new adapter adds nothing.
    """
    return 1 / math.sqrt(3 * size[1]) if name.endswith(DOWN) else 0.0
