"""Bits per byte with an interval over documents: it covers the truth as often as stated."""

import numpy as np
import pytest

from slipstream.pipeline.evaluate.language import bits_per_byte, bits_per_byte_gain
from slipstream.shared.formatting import NO_LIMIT


def test_it_is_the_ratio_of_the_sums_and_positive_if_fewer_bits_are_needed() -> None:
    sizes, before, after = np.array([10.0, 30.0]), np.array([20.0, 90.0]), np.array([10.0, 70.0])
    assert bits_per_byte(before, sizes) == 110 / 40
    found = bits_per_byte_gain(before, after, sizes)
    assert found.value == pytest.approx(30 / 40) and found.low < found.value < found.high
    back = bits_per_byte_gain(after, before, sizes)
    assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low))


def test_of_one_document_nothing_can_be_told() -> None:
    found = bits_per_byte_gain(np.array([20.0]), np.array([10.0]), np.array([10.0]))
    assert (found.low, found.high, found.shown) == (-NO_LIMIT, NO_LIMIT, 0)


def test_the_interval_holds_the_true_gain_about_as_often_as_it_says() -> None:
    draw, held, samples = np.random.default_rng(0), 0, 1000
    for _ in range(samples):
        sizes = draw.lognormal(6, 1, 60)
        before = sizes * 2.0
        after = sizes * (1.9 + 0.3 * draw.normal(size=60))  # the gain is 0.1 whatever the size of a document
        found = bits_per_byte_gain(before, after, sizes)
        held += found.low <= 0.1 <= found.high
    assert 0.90 < held / samples < 0.98
