"""Kneser-Ney model of text: probabilities, the published formulas, and the gain of more context."""

import json.decoder
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from slipstream.pipeline.evaluate import language
from slipstream.pipeline.evaluate.language import EDGE, SYMBOLS, KneserNey
from tests.support.corpora import story
from tests.support.wording import refuses

TEXTS = [story(number).encode() for number in range(40)]


def probability(model: KneserNey, before: bytes, symbol: int) -> float:
    """Of one symbol behind the last bytes of ``before``, which begins a document."""
    context = len(model.orders) - 1
    symbols = [*[EDGE] * context, *before][len(before) :] if context else []
    gram = np.array([0], np.uint64)
    for each in [*symbols, symbol]:
        gram = (gram << np.uint64(language.BITS)) | np.uint64(each)
    found = np.full(1, 1 / SYMBOLS)
    for length, order in enumerate(model.orders):
        found = language.interpolated_probabilities(order, gram & language.symbols_mask(length + 1), found)
    return float(found[0])


@pytest.mark.parametrize("context", [0, 1, 3, 6])
def test_what_follows_a_context_sums_to_one(context: int) -> None:
    model = KneserNey(TEXTS, context)
    for before in (b"", b"alpha b", b"never seen \xff\x00", b"story 3"):
        total = sum(probability(model, before, symbol) for symbol in range(SYMBOLS))
        assert total == pytest.approx(1, abs=1e-9)


def test_the_bits_of_a_document_are_those_of_its_bytes_and_its_end() -> None:
    model = KneserNey(TEXTS, 3)
    text = b"story: zeta eta \xe2"
    one_by_one = [-math.log2(probability(model, text[:place], symbol)) for place, symbol in enumerate(text)]
    one_by_one.append(-math.log2(probability(model, text, EDGE)))
    found = model.bits([b"", text, b"alpha"])
    assert found[1] == pytest.approx(sum(one_by_one), abs=1e-9)
    assert found[0] == pytest.approx(-math.log2(probability(model, b"", EDGE)), abs=1e-9)


def by_the_book(texts: list[bytes], context: int, before: tuple[int, ...], symbol: int) -> float:
    """Chen and Goodman's equations, counted with dictionaries: the probability behind ``context`` symbols."""

    def counts(length: int) -> dict[tuple[int, ...], int]:
        """Of the highest order how often, of lower ones behind how many different symbols."""
        found: dict[tuple[int, ...], int] = {}
        grams = [
            tuple(symbols[place - context : place + 1])
            for text in texts
            for symbols in [[*[EDGE] * context, *text, EDGE]]
            for place in range(context, len(symbols))
        ]
        kinds = grams if length == context else {gram[-length - 2 :] for gram in grams}
        for gram in kinds:
            found[gram[-length - 1 :]] = found.get(gram[-length - 1 :], 0) + 1
        return found

    fallen: dict[int, bool] = {}

    def of(length: int) -> float:
        if length < 0:
            return 1 / SYMBOLS
        known = counts(length)
        n = [sum(1 for c in known.values() if c == k) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1]) if all(n) else 0
        discount = [0.0, 1 - 2 * y * n[1] / n[0], 2 - 3 * y * n[2] / n[1], 3 - 4 * y * n[3] / n[2]] if y else [0.0]
        if not all(0 < discount[k] <= k for k in range(1, len(discount))) or not y:
            discount, fallen[length] = [0.0, 0.5, 1.0, 1.5], True
        here = before[len(before) - length :]
        behind = {gram[-1]: c for gram, c in known.items() if gram[:-1] == here}
        if not behind:
            return of(length - 1)
        total = sum(behind.values())
        left = sum(discount[min(c, 3)] for c in behind.values())
        c = behind.get(symbol, 0)
        return (max(c - discount[min(c, 3)], 0) + left * of(length - 1)) / total

    found = of(context)
    assert context not in fallen, "the formulas themselves are compared"
    return found


def test_it_is_the_formula_as_it_is_written() -> None:
    texts = Path(json.decoder.__file__).read_bytes().split(b"\n\n")
    model = KneserNey(texts, 2)
    for before, symbol in ((b"de", ord("c")), (b" s", ord("z")), (b"qq", ord("z")), (b"n)", EDGE), (b"se", ord("l"))):
        found = probability(model, before, symbol)
        assert found == pytest.approx(by_the_book(texts, 2, tuple(before), symbol), rel=1e-9)


def test_more_context_is_better_on_held_out_text() -> None:
    held_out = [story(number).encode() for number in range(40, 60)]
    size = sum(map(len, held_out))
    bits = [float(KneserNey(TEXTS, context).bits(held_out).sum()) / size for context in range(5)]
    assert bits[0] < 8 and all(after < before for before, after in pairwise(bits))
    assert bits[4] < 0.5 * bits[1]


def test_more_than_there_is_room_for_is_refused() -> None:
    with refuses(ValueError):
        KneserNey(TEXTS, 7)
