"""Fits of simulated logs with known distributions, and of logs with known solutions."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cpr.estimator.failures.fits import fit, fit_all, kaplan_meier, mean_time_interval, p_value
from cpr.estimator.failures.log import FailureLog, Stretch
from cpr.estimator.failures.log_report import report_on

HOUR = 3600.0
TRUTHS = {
    "exponential": (1.0, stats.expon(scale=20 * HOUR)),
    "gamma": (0.6, stats.gamma(0.6, scale=20 * HOUR / 0.6)),
    "weibull": (2.0, stats.weibull_min(2.0, scale=20 * HOUR / math.gamma(1.5))),
}

QUANTILES = tuple(stats.expon(scale=20 * HOUR).ppf((np.arange(50) + 0.5) / 50))
"""Fifty quantiles of an exponential distribution."""


def draw_log(truth, num_stretches, length_s, seed):
    """A log of jobs of `length_s` seconds each, all of which end without a failure (censored)."""
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
def test_fit_finds_the_true_parameters_with_a_third_of_the_gaps_censored(distribution):
    """The mean of the fits of twenty logs of some 60 failures is within its standard error."""
    shape, truth = TRUTHS[distribution]
    fits = [fit(draw_log(truth, 30, 40 * HOUR, seed), distribution) for seed in range(20)]
    for found, true in (("shape", shape), ("mean_s", 20 * HOUR)):
        logs = np.log([getattr(each, found) for each in fits])
        error = logs.std(ddof=1) / math.sqrt(len(logs))
        assert abs(logs.mean() - math.log(true)) <= 3.5 * error + 0.02  # small samples bias shapes by 1/n


@pytest.mark.parametrize("num_failures", [0, 3])
def test_interval_of_the_mean_has_its_nominal_probability(num_failures):
    log = FailureLog((Stretch((1.0,) * num_failures, 20.0),))
    low, high = mean_time_interval(log)
    rate = stats.gamma(num_failures + 0.5, scale=1 / log.exposure_s)
    assert rate.cdf(1 / low) - rate.cdf(1 / high) == pytest.approx(0.95)


def test_exponential_mean_is_time_over_failures():
    log = FailureLog((Stretch((3.0, 5.0), 12.0),))
    found = fit(log, "exponential")
    assert found.mean_s == 10.0
    assert found.log_likelihood == pytest.approx(-2 * math.log(10) - 20 / 10)
    assert found.aic == pytest.approx(2 - 2 * found.log_likelihood)


def test_fit_is_the_maximum_of_the_likelihood():
    log = draw_log(TRUTHS["gamma"][1], 10, 60 * HOUR, seed=3)
    found = fit(log, "gamma")
    for shape, mean in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        other = stats.gamma(found.shape * shape, scale=found.mean_s * mean / (found.shape * shape))
        likelihood = other.logpdf(log.gaps_s).sum() + other.logsf(log.unfinished_s).sum()
        assert likelihood < found.log_likelihood


def test_fits_are_sorted_by_aic():
    fits = fit_all(draw_log(TRUTHS["weibull"][1], 40, 100 * HOUR, seed=1))
    assert fits[0].distribution == "weibull"
    assert [each.aic for each in fits] == sorted(each.aic for each in fits)
    assert fits[-1].distribution == "exponential"


def test_few_failures_are_only_fitted_by_an_exponential():
    few = FailureLog((Stretch((3.0, 5.0), 12.0),))
    assert [each.distribution for each in fit_all(few)] == ["exponential"]
    with pytest.raises(ValueError, match="too few to fit"):
        fit(few, "gamma")
    with pytest.raises(ValueError, match="too few to judge"):
        p_value(few, fit(few, "exponential"))
    with pytest.raises(ValueError, match="0 failures are too few"):
        fit(FailureLog((Stretch((), 12.0),)), "exponential")


@pytest.mark.parametrize("jitter_s", [0.0, 1.0], ids=["equal", "nearly equal"])
def test_periodic_failures_are_refused_by_gamma_and_weibull(jitter_s):
    gaps = [24 * HOUR + jitter_s * each for each in (0, 1, -1, 0, 2, 0)]
    log = FailureLog((Stretch(tuple(gaps)),))
    assert [each.distribution for each in fit_all(log)] == ["exponential"]
    for family in ("gamma", "weibull"):
        with pytest.raises(ValueError, match=f"no {family} distribution .* --distribution recorded"):
            fit(log, family)
    assert "None of these describes them" in str(report_on(log))


def test_p_value_is_none_if_simulated_logs_have_too_few_failures():
    """With a mean time to failure far beyond the log, few simulated logs have failures at all."""
    log = draw_log(TRUTHS["exponential"][1], 10, 40 * HOUR, seed=2)
    found = fit(log, "exponential")
    assert p_value(log, found) is not None
    assert p_value(log, replace(found, mean_s=1e4 * found.mean_s)) is None
    report = replace(report_on(log), p_value=None)
    assert "cannot be told" in str(report)


def test_kaplan_meier_by_hand():
    log = FailureLog((Stretch((2.0, 3.0, 3.0), 5.0), Stretch((7.0,), 2.5)))
    times, over = kaplan_meier(log)
    assert list(times) == [2.0, 3.0, 7.0]
    # 6 at risk at 2; 2.5 leaves; 4 at risk at 3, two of them end; 5 leaves; 1 at risk at 7
    assert over == pytest.approx([1 / 6, 1 - 5 / 6 * 1 / 2, 1.0])


def test_p_value_is_small_for_the_wrong_distribution_only():
    regular = draw_log(TRUTHS["weibull"][1], 10, 200 * HOUR, seed=4)
    assert p_value(regular, fit(regular, "exponential")) <= 0.02
    random = draw_log(TRUTHS["exponential"][1], 10, 200 * HOUR, seed=4)
    assert p_value(random, fit(random, "exponential")) > 0.05


@pytest.mark.system
@pytest.mark.parametrize(
    ("log", "text"),
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
def test_report_tells_how_failures_come(log, text):
    assert text in str(report_on(log))
