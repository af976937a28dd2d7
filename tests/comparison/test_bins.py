"""Bins: every row is in exactly one, and equal values share one everywhere."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.shared.artifacts.results.scoring import Bins
from slipstream.shared.comparison.stability import (
    count_numbers,
    count_predictions,
    count_texts,
    fit_numbers,
    fit_predictions,
    fit_texts,
)

NUMBERS = st.lists(st.floats(allow_nan=True, allow_infinity=False, width=32), min_size=1, max_size=60)


@given(numbers=NUMBERS)
def test_every_number_is_in_a_bin_and_rounding_moves_none(numbers: list[float]) -> None:
    values = np.array(numbers, np.float64)
    bins = fit_numbers(values)
    assert sum(bins.counts) == len(values) and bins.counts[0] == np.isnan(values).sum()
    assert count_numbers(bins, values.astype(np.float32).astype(np.float64)).tolist() == bins.counts


def test_numbers_are_cut_into_tenths_and_few_values_into_their_own_bins() -> None:
    rng = np.random.default_rng(0)
    bins = fit_numbers(rng.normal(size=10_000))
    assert len(bins.counts) == 11 and min(bins.counts[1:]) > 900
    few = fit_numbers(np.repeat([1.0, 2.0, 3.0], [5, 3, 2]))
    assert few.edges == [1.5, 2.5] and few.counts == [0, 5, 3, 2]
    assert fit_numbers(np.full(9, np.nan)).counts == [9, 0]


def test_texts_have_bins_by_frequency_and_missing_ones_their_own() -> None:
    bins = fit_texts(Counter({"b": 5, "a": 5, "c": 1}), missing=2, others=4)
    assert bins.texts == ["a", "b", "c"] and bins.counts == [2, 5, 5, 1, 4]
    texts = pa.array(["a", None, "new", "a", "c", "?"]).dictionary_encode()
    cleaned = pa.DictionaryArray.from_arrays(
        texts.indices, pa.array([None if text == "?" else text for text in texts.dictionary.to_pylist()])
    )
    assert count_texts(bins, cleaned).tolist() == [2, 2, 0, 1, 1]


def test_of_many_texts_the_rare_are_others() -> None:
    bins = fit_texts(Counter({f"{index:03d}": 100 - index for index in range(100)}), missing=0)
    assert len(bins.texts) == 30 and bins.texts[0] == "000" and sum(bins.counts) == sum(range(1, 101))


def test_predictions_are_probabilities_of_two_classes_classes_of_more_or_values() -> None:
    rng = np.random.default_rng(0)
    two = rng.random((1000, 1))
    both = np.concatenate([1 - two, two], axis=1)
    assert fit_predictions(both, ["no", "yes"]) == fit_numbers(two[:, 0])
    many = np.eye(3)[[0, 1, 1, 2]]
    bins = fit_predictions(many, ["a", "b", "c"])
    assert bins.texts == ["b", "a", "c"] and count_predictions(bins, many, ["a", "b", "c"]).tolist() == bins.counts
    assert fit_predictions(two, []) == fit_numbers(two[:, 0])


@pytest.mark.parametrize(
    "wrong", [([1.0], [], [1, 2]), ([2.0, 1.0], [], [0, 0, 0, 0]), ([1.0], ["a"], [0, 0, 0, 0]), ([], [], [-1, 0])]
)
def test_bins_that_are_none_are_refused(wrong: tuple[list[float], list[str], list[int]]) -> None:
    with pytest.raises(ValueError):
        Bins(*wrong)
