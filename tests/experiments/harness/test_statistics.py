from statistics import mean

import numpy as np
import pytest

from experiments.harness.statistics import Estimate, Ratio, median_figures


def test_t_interval_contains_the_true_mean_in_95_percent_of_samples():
    samples = np.random.default_rng(1).normal(3.0, 2.0, (2000, 5))
    held = [abs(mean(sample) - 3.0) <= Estimate.of(sample).half_width for sample in samples.tolist()]
    assert 0.935 < mean(held) < 0.965


def test_figures_carry_their_intervals_and_ranges():
    assert median_figures("x", [3.0, 1.0, 2.0]) == {"x": 2.0, "x_low": 1.0, "x_high": 3.0}
    assert Estimate(2.0, 0.5).figures("x") == {"x": 2.0, "x_ci": 0.5}
    assert Ratio(value=2.0, low=1.0, high=3.0).figures("x") == {"x": 2.0, "x_low": 1.0, "x_high": 3.0}


@pytest.mark.parametrize(
    ("low", "high", "is_firm", "is_tie", "is_hit"),
    [
        (1.1, 1.3, True, False, True),
        (0.8, 0.9, True, False, False),
        (0.96, 1.04, False, True, True),
        (0.9, 1.04, False, False, False),
    ],
)
def test_ratio_is_decided_by_its_interval(low, high, is_firm, is_tie, is_hit):
    ratio = Ratio(value=(low + high) / 2, low=low, high=high)
    assert (ratio.is_firm, ratio.is_tie, ratio.is_hit) == (is_firm, is_tie, is_hit)


def test_bootstrap_interval_of_a_ratio_narrows_with_more_rounds():
    rounds = [1.0, 1.1, 1.2, 1.3, 1.4]
    few, many = Ratio.of(rounds), Ratio.of(rounds * 20)
    assert few.value == many.value == 1.2
    assert few.low <= many.low <= 1.2 <= many.high <= few.high
    assert many.reach < few.reach
