"""Decisions of the tuner on measurements with a known truth, with "no change" where nothing differs."""

import numpy as np
import pytest

from slipstream.pipeline.collectives.tune.decision import compare_settings


def turns(rng: np.random.Generator, gain: float, noise: float, count: int) -> tuple[list[float], list[float]]:
    """Times of both settings under a load that wanders, and is the same for both within a turn."""
    load = np.exp(np.cumsum(rng.normal(0, 0.1, count)))
    shake = lambda: np.exp(rng.normal(0, noise, count) + 0.5 * (rng.random(count) < 0.05))  # noqa: E731
    return (0.1 * load * shake()).tolist(), (0.1 / gain * load * shake()).tolist()


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("count", [5, 20])
def test_equal_settings_are_no_change_in_95_of_100_tunings(noise: float, count: int) -> None:
    tried = 5
    changed = sum(
        any(compare_settings(*turns(rng, 1.0, noise, count), tried).change for _ in range(tried))
        for rng in map(np.random.default_rng, range(200))
    )
    assert changed <= 6  # 1 of 100 is meant


def test_a_gain_is_found_when_it_stands_out_of_the_noise() -> None:
    found = [compare_settings(*turns(np.random.default_rng(seed), 1.9, 0.1, 10), 8) for seed in range(50)]
    assert all(decision.change for decision in found)
    assert sum(decision.low <= 1.9 <= decision.high for decision in found) >= 45


def test_a_gain_that_is_too_small_to_matter_is_no_change() -> None:
    decision = compare_settings([1.02] * 50, [1.0] * 50, 1)
    assert (decision.change, decision.low > 1) == (False, True)
    assert "no change: 1.02 times as fast" in str(decision)
    assert decision.unseen == pytest.approx(0.03)


def test_what_the_noise_may_have_hidden_is_said() -> None:
    decision = compare_settings(*turns(np.random.default_rng(3), 1.0, 0.3, 6), 8)
    assert not decision.change
    assert decision.unseen > 0.3
    assert f"a gain of less than {decision.unseen:.0%} would not be seen" in str(decision)


def test_a_slower_setting_is_never_taken() -> None:
    assert not any(compare_settings(*turns(np.random.default_rng(seed), 0.8, 0.3, 5), 1).change for seed in range(100))


def test_too_few_turns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 .* 3 and 3"):
        compare_settings([1.0] * 3, [1.0] * 3, 1)
