"""The number of retries for the expected preemptions of a stage."""

import numpy as np
import pytest
from scipy.stats import poisson

from slipstream.shared.profiles.profile import poisson_quantile, retries_for


@pytest.mark.parametrize("mean", [0.001, 0.01, 0.011, 0.3, 1.0, 4.2, 17.0, 250.0, 2_000.0])
@pytest.mark.parametrize("probability", [0.5, 0.99])
def test_the_quantile_is_scipys(mean: float, probability: float) -> None:
    assert poisson_quantile(mean, probability) == poisson.ppf(probability, mean)


def test_a_job_outlasts_99_of_100_nights_of_preemptions_at_random_times() -> None:
    # Two pods for 24 hours, each of them preempted twice a day on average: gaps between preemptions are exponential.
    retries = retries_for(preemptions_per_day=2, hours=24, pods=2)
    gaps = np.random.default_rng(0).exponential(1 / 4, (100_000, 40))
    preemptions = (gaps.cumsum(axis=1) < 1).sum(axis=1)
    assert (preemptions <= retries).mean() >= 0.99 > (preemptions <= retries - 1).mean()


def test_the_preemptions_of_a_single_pod_spend_the_budget_of_the_platform() -> None:
    assert retries_for(preemptions_per_day=50, hours=24, pods=1) == 0


def test_without_preemptions_there_is_nothing_to_retry() -> None:
    assert retries_for(preemptions_per_day=0, hours=24, pods=8) == 0
    assert retries_for(preemptions_per_day=2, hours=0, pods=8) == 0
