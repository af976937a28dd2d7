"""Initial values of a model with adapters: the base's weights, and drawn or stored adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.shared.models.adapters.layers import CODES, SCALES, initial_std, is_adapter
from slipstream.shared.models.adapters.nf4 import BLOCK, QuantisedWeight, quantise_weight
from slipstream.shared.models.initial.drawn import draw_slice
from slipstream.shared.models.initial.values import InitialValues

#: Approximate number of elements that are quantised at once.
AT_ONCE = 1 << 22


@dataclass
class AdaptedValues:
    """Initial values of a model with adapters.

    ``base`` gives the values of the model without adapters. ``start`` gives the adapters' values; if it is None, they
    are drawn from ``seed``.
    """

    base: InitialValues
    seed: int
    start: InitialValues | None = None
    #: Name of the weight, first row and number of rows that were quantised last.
    _rows: tuple[str, int, int] = ("", 0, 0)
    #: Result for these rows, kept because codes and scales are requested one after the other.
    _parts: QuantisedWeight | None = field(default=None, repr=False)

    @torch.no_grad()
    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill a parameter's slice; see :class:`~slipstream.shared.models.initial.values.InitialValues`."""
        if is_adapter(name) and self.start:
            self.start.fill(part, name, size, offsets)
        elif is_adapter(name):
            draw_slice(part, name, size, offsets, std=initial_std(name, size), seed=self.seed)
        elif name.endswith((CODES, SCALES)):
            assert part.shape[1] == size[1], "nothing divides the rows of weights in four bits"
            codes = name.endswith(CODES)
            weight = f"{name.removesuffix(CODES).removesuffix(SCALES)}.weight"
            found = self._quantised(part, weight, size[0], size[1] * (2 if codes else BLOCK), offsets[0])
            part.copy_(found.codes if codes else found.scales)
        else:
            self.base.fill(part, name, size, offsets)

    def _quantised(self, part: Tensor, weight: str, out: int, width: int, first: int) -> QuantisedWeight:
        """Quantise ``len(part)`` rows of ``weight`` ``[out, width]``, starting at row ``first``."""
        rows = weight, first, len(part)
        if self._parts is None or self._rows != rows:
            self._parts, self._rows = None, rows
            found, step = list[QuantisedWeight](), max(1, AT_ONCE // width)
            for start in range(first, first + len(part), step):
                plain = torch.empty(min(step, first + len(part) - start), width, device=part.device)
                self.base.fill(plain, weight, (out, width), (start, 0))
                found.append(quantise_weight(plain))
            empty = quantise_weight(torch.empty(0, width, device=part.device))
            self._parts = QuantisedWeight(*map(torch.cat, zip(empty, *found, strict=True)))
        return self._parts
