"""Sampling of continuations from a language model, token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.predict import ModelFunction


def sample_continuations(
    run: ModelFunction,
    signature: Signature,
    prompts: Sequence[Sequence[int]],
    most: int,
    stops: Collection[int],
    seed: int = 0,
) -> list[list[int]]:
    """Return at most ``most`` ids sampled after each prompt, up to and excluding the first of ``stops``.

    Ids are drawn with the model's probabilities; equal seeds give equal results. The model sees the last ids that fit
    in a row. Later positions are padding, which causal attention ignores.
    """
    (length,), draw = signature.inputs[0].shape, np.random.default_rng(seed)
    drawn: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    for _ in range(most):
        if not going:
            break
        rows = np.zeros((len(going), length), signature.inputs[0].dtype)
        ends = []
        for row, number in zip(rows, going, strict=True):
            ids = [*prompts[number], *drawn[number]][-length:]
            row[: len(ids)] = ids
            ends.append(len(ids) - 1)
        logits = run([rows])[np.arange(len(going)), ends].astype(np.float64)
        shares = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
        for number, share, place in zip(list(going), shares, draw.random(len(going)), strict=True):
            token = min(int(np.searchsorted(share, place * share[-1], side="right")), len(share) - 1)
            if token in stops:
                going.remove(number)
            else:
                drawn[number].append(token)
    return drawn
