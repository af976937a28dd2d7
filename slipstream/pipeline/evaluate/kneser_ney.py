"""Count-based byte language model: interpolated modified Kneser-Ney smoothing.

Method: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998, section 3. The
probability of a byte after k bytes is its discounted share of the counts in that context. The discounted mass is
distributed by the model of k - 1 bytes, in which a byte counts once per distinct byte before it. Below the model of 0
bytes is the uniform distribution. A document is preceded by edge symbols and ends with an edge symbol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Edge symbol, which stands before and after documents, and number of symbols.
EDGE, SYMBOLS = 256, 257
#: Bits per symbol in a gram: a number that holds a context and the next symbol.
BITS = 9
#: Longest context in bytes that fits uint64.
MOST_CONTEXT = 6
#: Count from which discounts are equal; and discounts by count if they cannot be estimated (as in KenLM, Heafield
#: 2011).
DISCOUNTED, FALLBACK = 3, np.array([0.0, 0.5, 1.0, 1.5])


@dataclass(frozen=True)
class ContextModel:
    """Model of one context length.

    ``grams`` (uint64, ascending) are contexts with the next byte, ``discounted`` their discounted counts. ``contexts``
    (ascending) have ``totals`` (all counts) and ``left``, the sum of the discounts.
    """

    grams: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    left: np.ndarray


class KneserNey:
    """Model with at most ``context`` bytes of context; raises ``ValueError`` beyond ``MOST_CONTEXT``."""

    def __init__(self, documents: Sequence[bytes], context: int) -> None:
        if not 0 <= context <= MOST_CONTEXT:
            raise ValueError(f"a context of {context} bytes; expected 0 to {MOST_CONTEXT}")
        grams, counts = np.unique(all_grams(documents, context), return_counts=True)
        orders = [order_of(grams, counts)]
        for length in range(context - 1, -1, -1):
            # A shorter one counts once per distinct symbol before it.
            grams, counts = np.unique(grams & symbols_mask(length + 1), return_counts=True)
            orders.append(order_of(grams, counts))
        #: Models by context length, from 0 bytes on.
        self.orders = orders[::-1]

    def bits(self, documents: Sequence[bytes]) -> np.ndarray:
        """Return the bits that each document with its end has under the model, float64 ``[documents]``."""
        grams = all_grams(documents, len(self.orders) - 1)
        probabilities = np.full(len(grams), 1 / SYMBOLS)
        for length, order in enumerate(self.orders):
            probabilities = interpolated_probabilities(order, grams & symbols_mask(length + 1), probabilities)
        ends = np.cumsum([len(document) + 1 for document in documents])
        return np.add.reduceat(-np.log2(probabilities), np.concatenate([[0], ends[:-1]]))


def symbols_mask(symbols: int) -> np.uint64:
    return np.uint64((1 << BITS * symbols) - 1)


def all_grams(documents: Iterable[bytes], context: int) -> np.ndarray:
    """Return every byte and end of all documents with its context: uint64, the symbol in the lowest bits."""
    edges = np.full(context, EDGE, np.uint64)
    parts = []
    for document in documents:
        symbols = np.concatenate([edges, np.frombuffer(document, np.uint8).astype(np.uint64), [np.uint64(EDGE)]])
        grams = np.zeros(len(document) + 1, np.uint64)
        for place in range(context + 1):
            grams = (grams << np.uint64(BITS)) | symbols[place : place + len(grams)]
        parts.append(grams)
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def order_of(grams: np.ndarray, counts: np.ndarray) -> ContextModel:
    """Build the model of one context length from distinct ``grams``, ascending, and their counts."""
    discounts = discounts_of(counts)[np.minimum(counts, DISCOUNTED)]
    contexts, first = np.unique(grams >> np.uint64(BITS), return_index=True)
    return ContextModel(
        grams=grams,
        discounted=counts - discounts,
        contexts=contexts,
        totals=np.add.reduceat(counts, first).astype(np.float64),
        left=np.add.reduceat(discounts, first),
    )


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2, and 3 or more (float64 ``[4]``), or ``FALLBACK``.

    They are estimated from the numbers of counts 1 to 4 (Chen and Goodman, equation 26). Too few counts make the
    estimate unusable.
    """
    of = [int(np.count_nonzero(counts == count)) for count in range(1, DISCOUNTED + 2)]
    if not all(of):
        return FALLBACK
    share = of[0] / (of[0] + 2 * of[1])
    found = [count - (count + 1) * share * of[count] / of[count - 1] for count in range(1, DISCOUNTED + 1)]
    # A discount of 0 would leave unseen bytes no probability.
    good = all(0 < discount <= count for count, discount in enumerate(found, 1))
    return np.array([0.0, *found]) if good else FALLBACK


def interpolated_probabilities(order: ContextModel, grams: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Return the probabilities of ``grams``, interpolated with ``shorter``, those for a shorter context.

    For an unseen context they are ``shorter``.
    """
    place, seen = found_in(order.contexts, grams >> np.uint64(BITS))
    which, known = found_in(order.grams, grams)
    counted = np.where(known, order.discounted[which], 0.0)
    mixed = (counted + order.left[place] * shorter) / order.totals[place]
    return np.where(seen, mixed, shorter)


def found_in(ascending: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index in ``ascending`` of each number ``wanted``, and True where it is present."""
    # Sorted queries look up neighbouring positions: three times as fast.
    order = np.argsort(wanted)
    place = np.empty(len(wanted), np.int64)
    place[order] = np.searchsorted(ascending, wanted[order])
    place = np.minimum(place, len(ascending) - 1)
    return place, ascending[place] == wanted
