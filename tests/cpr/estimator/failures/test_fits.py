"""Fits against simulated logs of which the truth is known, and against formulas where there are some."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cpr.estimator.failures.fits import _drawn, fit, fit_all, kaplan_meier, mean_time_interval, p_value
from cpr.estimator.failures.log import FailureLog, Stretch
from cpr.estimator.failures.report import report_on

HOUR = 3600.0
TRUTHS = {
    "exponential": (1.0, stats.expon(scale=20 * HOUR)),
    "gamma": (0.6, stats.gamma(0.6, scale=20 * HOUR / 0.6)),
    "weibull": (2.0, stats.weibull_min(2.0, scale=20 * HOUR / math.gamma(1.5))),
}

QUANTILES = tuple(stats.expon(scale=20 * HOUR).ppf((np.arange(50) + 0.5) / 50))
"""As much like an exponential distribution as fifty times can be."""


def draw_log(truth, num_stretches, length_s, seed):
    """Jobs that are watched for so long each: all of them end without a failure (censored)."""
    random = np.random.default_rng(seed)
    stretches = []
    for _ in range(num_stretches):
        gaps, left_s = [], length_s
        while (gap := truth.rvs(random_state=random)) < left_s:
            gaps.append(float(gap))
            left_s -= gap
        stretches.append(Stretch(tuple(gaps), float(left_s)))
    return FailureLog(tuple(stretches))


@pytest.mark.parametrize("distribution", TRUTHS)
def test_the_truth_is_found_although_one_gap_in_three_is_cut_short(distribution):
    """Twenty logs of some 60 failures each: their mean is as near to the truth as its standard error says."""
    shape, truth = TRUTHS[distribution]
    fits = [fit(draw_log(truth, 30, 40 * HOUR, seed), distribution) for seed in range(20)]
    for found, true in (("shape", shape), ("mean_s", 20 * HOUR)):
        logs = np.log([getattr(each, found) for each in fits])
        error = logs.std(ddof=1) / math.sqrt(len(logs))
        assert abs(logs.mean() - math.log(true)) <= 3.5 * error + 0.02  # small samples bias shapes by 1/n


def test_an_exponential_is_time_over_failures():
    log = FailureLog((Stretch((3.0, 5.0), 12.0),))
    found = fit(log, "exponential")
    assert found.mean_s == 10.0
    assert found.log_likelihood == pytest.approx(-2 * math.log(10) - 20 / 10)
    assert found.aic == pytest.approx(2 - 2 * found.log_likelihood)


def test_no_other_parameters_are_likelier():
    log = draw_log(TRUTHS["gamma"][1], 10, 60 * HOUR, seed=3)
    found = fit(log, "gamma")
    for shape, mean in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        other = stats.gamma(found.shape * shape, scale=found.mean_s * mean / (found.shape * shape))
        likelihood = other.logpdf(log.gaps_s).sum() + other.logsf(log.unfinished_s).sum()
        assert likelihood < found.log_likelihood


def test_the_best_is_first():
    fits = fit_all(draw_log(TRUTHS["weibull"][1], 40, 100 * HOUR, seed=1))
    assert fits[0].distribution == "weibull"
    assert [each.aic for each in fits] == sorted(each.aic for each in fits)
    assert fits[-1].distribution == "exponential"


def test_few_failures_have_no_shape():
    few = FailureLog((Stretch((3.0, 5.0), 12.0),))
    assert [each.distribution for each in fit_all(few)] == ["exponential"]
    with pytest.raises(ValueError, match="too few to fit"):
        fit(few, "gamma")
    with pytest.raises(ValueError, match="too few to judge"):
        p_value(few, fit(few, "exponential"))
    with pytest.raises(ValueError, match="0 failures are too few"):
        fit(FailureLog((Stretch((), 12.0),)), "exponential")


@pytest.mark.parametrize("jitter_s", [0.0, 1.0], ids=["equal", "nearly equal"])
def test_a_regular_beat_is_no_distribution_and_no_crash(jitter_s):
    gaps = [24 * HOUR + jitter_s * each for each in (0, 1, -1, 0, 2, 0)]
    log = FailureLog((Stretch(tuple(gaps)),))
    assert [each.distribution for each in fit_all(log)] == ["exponential"]
    for family in ("gamma", "weibull"):
        with pytest.raises(ValueError, match=f"no {family} distribution .* --distribution recorded"):
            fit(log, family)
    assert "None of these describes them" in str(report_on(log))


def test_logs_that_can_hardly_be_judged_are_not_waited_for():
    """Of a mean time to failure that is far longer than the time watched, few draws have failures at all."""
    log = draw_log(TRUTHS["exponential"][1], 10, 40 * HOUR, seed=2)
    found = fit(log, "exponential")
    assert p_value(log, found) is not None
    assert p_value(log, replace(found, mean_s=1e4 * found.mean_s)) is None
    report = replace(report_on(log), p_value=None)
    assert "cannot be told" in str(report)


def test_drawn_logs_are_watched_as_long_and_have_as_many_failures_on_average():
    log = draw_log(TRUTHS["gamma"][1], 5, 100 * HOUR, seed=1)
    found, random = fit(log, "exponential"), np.random.default_rng(0)
    drawn = [_drawn(log, found, random) for _ in range(400)]
    for each in drawn:
        assert each.exposure_s == pytest.approx(log.exposure_s)
        for stretch in each.stretches:
            assert sum(stretch.gaps_s) + stretch.unfinished_s == pytest.approx(100 * HOUR)
    counts = np.array([each.num_failures for each in drawn])
    expected = log.exposure_s / found.mean_s  # failures at random are Poisson distributed
    assert abs(counts.mean() - expected) < 3.5 * math.sqrt(expected / len(counts))


def test_kaplan_meier_by_hand():
    log = FailureLog((Stretch((2.0, 3.0, 3.0), 5.0), Stretch((7.0,), 2.5)))
    times, over = kaplan_meier(log)
    assert list(times) == [2.0, 3.0, 7.0]
    # 6 at risk at 2; 2.5 leaves; 4 at risk at 3, two of them end; 5 leaves; 1 at risk at 7
    assert over == pytest.approx([1 / 6, 1 - 5 / 6 * 1 / 2, 1.0])


def test_a_fit_of_the_right_kind_passes_and_of_the_wrong_kind_does_not():
    regular = draw_log(TRUTHS["weibull"][1], 10, 200 * HOUR, seed=4)
    assert p_value(regular, fit(regular, "exponential")) <= 0.02
    random = draw_log(TRUTHS["exponential"][1], 10, 200 * HOUR, seed=4)
    assert p_value(random, fit(random, "exponential")) > 0.05


@pytest.mark.parametrize("num_failures", [0, 1, 3, 30])
def test_the_interval_covers_the_truth_as_often_as_it_says(num_failures):
    """The posterior is exact: drawn from the prior's posterior, the rate is inside in 95 % of the cases."""
    log = FailureLog((Stretch((1.0,) * num_failures, 20.0),))
    low, high = mean_time_interval(log)
    rate = stats.gamma(num_failures + 0.5, scale=1 / log.exposure_s)
    assert rate.cdf(1 / low) - rate.cdf(1 / high) == pytest.approx(0.95)
    assert low < log.exposure_s / max(1, num_failures) < high


def test_few_failures_give_a_wide_interval_that_holds():
    """How often, over many logs with two failures on average, the true mean is inside: about 95 %."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        num_failures = random.poisson(2.0)
        low, high = mean_time_interval(FailureLog((Stretch((1e-9,) * num_failures, 2 * HOUR),)))
        inside += low <= HOUR <= high
    assert 0.92 <= inside / 1000 <= 0.99


@pytest.mark.system
@pytest.mark.parametrize(
    ("log", "told"),
    [
        (draw_log(TRUTHS["gamma"][1], 30, 100 * HOUR, seed=5), "come in bursts: "),
        (draw_log(TRUTHS["weibull"][1], 30, 100 * HOUR, seed=5), "come regularly: weibull with shape"),
        (FailureLog((Stretch(QUANTILES),)), "come at random, as far as one can tell"),
        (FailureLog((Stretch((HOUR, 2 * HOUR), 7 * HOUR),)), "Too few to tell"),
        (FailureLog((Stretch((), 7 * HOUR),)), "0 failures in 7 h"),
        (FailureLog((Stretch((60.0,) * 15 + (100 * HOUR,) * 15),)), "None of these describes them"),
    ],
    ids=["bursts", "regular", "random", "few", "none", "neither"],
)
def test_what_is_said_of_them(log, told):
    assert told in str(report_on(log))
