"""Gradient noise from norms of own and of averaged gradients."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.renting.noise import GradientNoise
from tests.cpr.estimator.renting.lines import noise


@given(
    st.integers(2, 64),
    st.integers(1, 1000),
    st.floats(1e-6, 1e6),
    st.floats(0.01, 1e3),
)
def test_expected_norms_give_the_noise_back(workers, part, squared_norm, ratio):
    batch = workers * part
    found = noise(workers, batch, squared_norm=squared_norm, scale=ratio * batch)
    assert found.squared_norm == pytest.approx(squared_norm, rel=1e-9)
    assert found.trace == pytest.approx(ratio * batch * squared_norm, rel=1e-9)
    assert found.scale == pytest.approx(ratio * batch, rel=1e-8)
    assert 1 / workers < found.gamma < 1


@pytest.mark.parametrize("sizes", [[8, 8, 8], [3, 5, 16]])
def test_estimates_are_unbiased_whatever_the_parts(sizes):
    """Means over all draws of a batch: from a population of two gradients, weighted by their chances."""
    gradients = np.array([[3.0, 1.0], [0.5, -2.0]])
    mean = gradients.mean(0)
    trace = ((gradients - mean) ** 2).sum(1).mean()
    batch, bounds = sum(sizes), np.cumsum([0, *sizes])
    rng = np.random.default_rng(0)
    drawn = gradients[rng.integers(2, size=(200_000, batch))]
    parts = [drawn[:, low:high].mean(1) for low, high in pairwise(bounds)]
    local = sum(size / batch * (part**2).sum(1) for size, part in zip(sizes, parts, strict=True))
    averaged = (drawn.mean(1) ** 2).sum(1)
    found = GradientNoise(
        workers=len(sizes), batch=batch, steps=len(drawn), local=local.mean(), averaged=averaged.mean()
    )
    assert found.trace == pytest.approx(trace, rel=0.02)
    assert found.squared_norm == pytest.approx((mean**2).sum(), rel=0.02)


def test_gradients_that_are_lost_in_noise_have_no_scale():
    lost = GradientNoise(workers=2, batch=10, steps=3, local=2.0, averaged=0.9)
    assert lost.squared_norm < 0
    assert lost.scale is None
    alike = GradientNoise(workers=2, batch=10, steps=3, local=0.9, averaged=1.0)
    assert alike.scale is None, "a variance is not negative"
    still = GradientNoise(workers=2, batch=10, steps=3, local=0.0, averaged=0.0)
    assert (still.scale, still.gamma) == (None, None)


def test_one_worker_shows_no_noise():
    with pytest.raises(ValueError, match="train with at least two"):
        GradientNoise(workers=1, batch=10, steps=3, local=1.0, averaged=1.0)
