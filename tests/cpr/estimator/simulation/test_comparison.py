"""Comparisons of formulas and simulation, with the reasons of differences."""

from dataclasses import replace

import pytest

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import Job, expected_pls
from cpr.estimator.simulation.comparison import compare, departures
from cpr.estimator.simulation.comparison_text import as_text
from cpr.estimator.simulation.simulation import Mean

HOUR = 3600.0
CALM = Job(T_total=500 * HOUR, T_fail=20 * HOUR, O_save=1, O_load=10, O_res=10, N_emb=8)
PAPER = Job(T_total=56 * HOUR, T_fail=28 * HOUR, O_save=336, O_load=162, O_res=162, N_emb=8)


@pytest.fixture(scope="module")
def paper():
    return compare(PAPER, FailureModel(), target_pls=0.1)


def test_gain_is_paired_by_run(paper):
    full, partial = paper.full.simulation, paper.partial.simulation
    assert paper.saved == Mean.of(full.overheads - partial.overheads)
    assert paper.saved.value == pytest.approx(full.overhead.value - partial.overhead.value)
    assert paper.saved.half_width < full.overhead.half_width


def test_formulas_include_group_failures():
    groups = FailureModel(group_share=0.5, group_nodes=3)
    both = compare(CALM, groups, target_pls=0.1, interval_s=HOUR)
    assert both.partial.expected_pls == pytest.approx(2 * expected_pls(CALM, HOUR))
    assert not both.partial.departs


def test_no_departures_where_the_formulas_are_right():
    right = compare(CALM, FailureModel(), target_pls=0.1, interval_s=0.2 * HOUR)
    assert departures(right) == []
    assert as_text(right).endswith("the formulas agree")


@pytest.mark.parametrize(
    ("job", "failures", "interval_h", "reason"),
    [
        (
            CALM,
            FailureModel(),
            40,
            "full recovery's interval of 40 h is not far shorter than the time between",
        ),
        (PAPER, FailureModel(), 45, "partial recovery's interval of 45 h fits only 1.2 times into the job"),
        (replace(CALM, O_load=2 * HOUR), FailureModel(), 1, "comes before a recovery is over"),
        (replace(CALM, O_save=4 * HOUR), FailureModel(), 5, "often break a save"),
        (CALM, FailureModel(distribution="gamma", shape=0.2), 1.5, "failures have a memory"),
        (CALM, FailureModel(distribution="weibull", shape=0.3, scope="node"), 1.5, "failures have a memory"),
        (replace(CALM, T_fail=HOUR, O_res=300), FailureModel(), 0.1, "failures also come while a job saves"),
        (
            replace(CALM, T_fail=HOUR, O_res=300, N_emb=200),
            FailureModel(distribution="gamma", shape=2, scope="node"),
            0.1,
            "failures also come while a job saves",
        ),
    ],
)
def test_departures_are_explained(job, failures, interval_h, reason):
    reasons = departures(compare(job, failures, target_pls=0.1, interval_s=interval_h * HOUR))
    assert any(reason in each for each in reasons), reasons


def test_text_contains_the_figures(paper):
    text = as_text(paper)
    lines = {line[:29].strip(): line[29:].split() for line in text.splitlines()}
    assert lines["interval"] == ["2.29", "h", "2.29", "h", "44.8", "h", "44.8", "h"]
    overhead = lines["overhead"]
    assert overhead[:2] == ["8.49", "%"]
    assert float(overhead[2]) == pytest.approx(100 * paper.full.simulation.overhead.value, abs=0.005)
    assert "1,000 runs of" in text
    assert "a failure every 28 h, at random" in text


def test_text_describes_failures_and_unfinished_runs():
    failures = FailureModel(distribution="weibull", shape=0.7, scope="node", group_share=0.25, group_nodes=3)
    hopeless = compare(
        replace(PAPER, T_total=2 * HOUR, T_fail=60.0), failures, target_pls=0.1, interval_s=HOUR, num_trials=5
    )
    text = as_text(hopeless)
    assert "weibull of shape 0.7, of each node by itself; 0.25 of them take 3 nodes" in text
    assert "full recovery: 100.0% of the runs were given up after 10 times the useful time" in text
