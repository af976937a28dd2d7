"""The learning rate: a pure function of the step, so that checkpoints need not hold any state of it."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share ``warmup`` of all steps, then a half cosine to zero (Loshchilov, Hutter 2017).

    ``step`` counts from 0; the rates of the first and the last step are above 0.
    """
    rising = math.ceil(warmup * total)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))
