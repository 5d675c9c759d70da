"""Times between failures have the distribution and the mean that were asked for."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpr.faults.draws import make_draw

NUM_DRAWS = 4000
ALPHA = 1e-9
"""Of each comparison with scipy: with 60 of them, a false alarm in sixteen million runs of this file."""


def of_scipy(distribution, shape):
    """The same distribution, with mean 1, as scipy has it."""
    if distribution == "exponential":
        return stats.expon()
    raw = {
        "gamma": lambda **scale: stats.gamma(shape, **scale),
        "weibull": lambda **scale: stats.weibull_min(shape, **scale),
        # scipy's cuts are in standard deviations from the mean
        "normal": lambda scale=1.0: stats.truncnorm(-shape, np.inf, loc=shape * scale, scale=scale),
    }[distribution]
    return raw(scale=1 / raw().mean())


@settings(max_examples=60)
@given(
    distribution=st.sampled_from(["exponential", "gamma", "weibull", "normal"]),
    shape=st.floats(0.5, 20),
    seed=st.integers(0, 2**32),
)
def test_draws_follow_the_distribution_with_mean_1(distribution, shape, seed):
    draw, random = make_draw(distribution, shape), Random(seed)
    values = [draw(random) for _ in range(NUM_DRAWS)]
    expected = of_scipy(distribution, shape)
    assert min(values) >= 0
    assert stats.kstest(values, expected.cdf).pvalue > ALPHA
    # The mean of so many draws is close to normal (skewness is 6.6 at most, for weibull at 0.5): 7 of its
    # standard deviations leave room for that.
    assert abs(np.mean(values) - 1) < 7 * expected.std() / math.sqrt(NUM_DRAWS)


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "weibull", "normal"])
@pytest.mark.parametrize("shape", [0.0, -1.0, math.nan, math.inf])
def test_shape_must_be_positive(distribution, shape):
    with pytest.raises(ValueError, match="positive"):
        make_draw(distribution, shape)


def test_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="exponential, gamma, weibull, normal"):
        make_draw("pareto", 1.0)
    with pytest.raises(ValueError, match="cannot be drawn"):
        make_draw("weibull", 1e-3)
