"""Samples to a target by batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression

from cpr.estimator.renting.samples import SamplesNeeded, Target, monotone

AUC = Target(metric="auc", value=0.75)
CURVE = [(100.0, 0.6), (200.0, 0.7), (300.0, 0.8), (400.0, 0.74)]


def test_a_target_is_reached_between_two_evaluations():
    assert AUC.reached_after(CURVE) == pytest.approx(250)
    assert Target(metric="log_loss", value=0.5).reached_after([(10, 0.8), (20, 0.4)]) == pytest.approx(17.5)
    assert Target.parse("auc=0.6").reached_after(CURVE) == 100
    assert Target.parse("auc=0.81").reached_after(CURVE) is None
    assert AUC.reached_after([]) is None
    assert (AUC.best_of(CURVE), Target.parse("log_loss=1").best_of(CURVE)) == (0.8, 0.6)


def test_a_lucky_evaluation_reaches_nothing():
    curve = [(100, 0.70), (200, 0.76), (300, 0.72), (400, 0.80), (500, 0.60)]
    assert monotone(curve, falls=False) == [
        (100, 0.70),
        (200, pytest.approx(0.74)),
        (300, pytest.approx(0.74)),
        (400, 0.80),
    ]
    assert AUC.reached_after(curve) == pytest.approx(300 + 100 / 6)
    falling = [(samples, -value) for samples, value in curve]
    assert monotone(falling, falls=True) == [(each, -value) for each, value in monotone(curve, falls=False)]
    assert monotone([], falls=True) == []


values = st.lists(st.floats(0, 1), min_size=1)


@given(values)
def test_a_monotone_curve_is_as_near_as_scikit_learns(found):
    best = found.index(max(found)) + 1
    smooth = [value for _, value in monotone(list(enumerate(found)), falls=False)]
    assert smooth == pytest.approx(isotonic_regression(found[:best]), abs=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [("speed=3", "no known metric: write METRIC=VALUE, with one of auc"), ("auc=high", "has no number")],
)
def test_targets_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        Target.parse(text)


@given(st.floats(1e3, 1e9), st.floats(1.0, 1e5), st.lists(st.integers(1, 10**6), min_size=2, unique=True))
def test_runs_of_several_batches_give_the_law_back(least_samples, least_steps, batches):
    reached = {batch: least_samples + least_steps * batch for batch in batches}
    found = SamplesNeeded.by_runs(reached, "")
    for batch, samples in reached.items():
        assert found.at(batch) == pytest.approx(samples, rel=1e-6)


def test_where_batches_do_not_matter_none_is_critical():
    assert SamplesNeeded.by_runs({512: 3e4, 4096: 3e4}, "").critical_batch is None


def test_noise_gives_the_samples_of_other_batches():
    """At the noise scale, a batch takes twice the fewest samples (McCandlish et al., section 2.3)."""
    found = SamplesNeeded.by_noise(1000, 3e6, 500.0, "")
    assert found.at(1000) == pytest.approx(3e6)
    assert found.critical_batch == pytest.approx(500)
    assert found.at(500) == pytest.approx(2 * found.least_samples)
    even = SamplesNeeded.by_noise(1000, 3e6, None, "")
    assert (even.at(1), even.at(10**9), even.critical_batch) == (3e6, 3e6, None)
