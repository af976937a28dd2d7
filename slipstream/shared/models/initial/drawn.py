"""Random initial values as a pure function of seed and parameter name.

Every device fills only its slice, and values do not depend on how parameters are divided. Element ``i`` of a parameter
is the normal quantile of the ``i``-th draw of a counter-based generator (Philox: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) whose key is a digest of seed and name.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

#: Approximate number of elements drawn at once.
CHUNK = 1 << 18
#: Number of draws per value of Philox's counter.
LANES = 4


@runtime_checkable
class StatesDeviations(Protocol):
    """Model that states the standard deviations of its parameters' initial values."""

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter; None if it starts from ones."""


@dataclass(frozen=True)
class DrawnValues:
    """Initial values of a model with ``initial_std``, drawn from ``seed``."""

    model: nn.Module
    seed: int

    @torch.no_grad()
    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill a parameter's slice; see :class:`~slipstream.shared.models.initial.drawn.InitialValues`."""
        assert isinstance(self.model, StatesDeviations)
        draw_slice(part, name, size, offsets, std=self.model.initial_std(name), seed=self.seed)


def draw_slice(
    part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int], *, std: float | None, seed: int
) -> None:
    """Fill a slice of a parameter with normal values of deviation ``std``; with ones if ``std`` is None."""
    if std is None:
        part.fill_(1.0)
    elif not std:
        part.zero_()
    elif part.numel():
        width = math.prod(size[1:])
        first = offsets[0] if offsets else 0
        columns = slice(offsets[1], offsets[1] + part.shape[1]) if len(size) == 2 else slice(None)
        rows = max(1, CHUNK // width)
        part = part if part.ndim else part.view(1)

        @torch.no_grad()  # of this thread alone
        def fill(start: int) -> None:
            target = part[start : start + rows]
            drawn = normal_sequence(seed, name, (first + start) * width, len(target) * width)
            target.copy_(torch.from_numpy(drawn.reshape(len(target), width)[:, columns] * std).reshape(target.shape))

        # NumPy and SciPy draw without Python's lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            deque(threads.map(fill, range(0, len(part), rows)), maxlen=0)


def normal_sequence(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """Return elements ``start`` to ``start + count`` of the standard normal sequence of ``(seed, name)``, float64."""
    from scipy.special import ndtri

    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), np.uint64)
    counter, skipped = divmod(start, LANES)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[counter, 0, 0, 0]))
    drawn = generator.random(skipped + count)[skipped:]
    drawn += 2.0**-54  # midpoints of 2**53 equal intervals of (0, 1), so that no quantile is infinite
    return ndtri(drawn, out=drawn)


class InitialValues(Protocol):
    """Initial values of parameters; every device fills only the slices that it holds."""

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill ``part``, a slice that starts at ``offsets`` of the parameter ``name`` with shape ``size``.

        A parameter is divided along its first dimension; a parameter of two dimensions along either. Raises
        ``UserError`` if the values are missing.
        """


@torch.no_grad()
def allocate_zeros(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, zeroed.

    Arbitrary contents could be denormal numbers, which slow a pass down.
    """
    for parameter in model.to_empty(device=device).parameters():
        parameter.zero_()


@torch.no_grad()
def fill_parameters(model: nn.Module, values: InitialValues) -> None:
    for name, parameter in model.named_parameters():
        values.fill(parameter, name, parameter.shape, (0,) * parameter.ndim)
