"""The formulas reproduce the paper's figures, and have the properties that hold for all jobs."""

# ruff: noqa: N806 - the paper's symbols

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpr.estimator.planning.formulas import (
    expected_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
    partial_wins,
    pls_threshold,
    reachable_pls,
)
from tests.cpr.estimator.planning.jobs import HOUR, KAGGLE, TERABYTE, jobs


@pytest.mark.parametrize(
    ("job", "interval_h", "full", "naive", "partial"),
    [(KAGGLE, 2.3, 0.085, 0.0441, 0.0053), (TERABYTE, 2.2, 0.082, 0.0435, 0.0068)],
    ids=["kaggle", "terabyte"],
)
def test_overheads_of_the_paper(job, interval_h, full, naive, partial):
    T_full = interval_full(job)
    assert T_full == pytest.approx(interval_h * HOUR, rel=0.02)
    assert overhead_full(job, T_full).total == pytest.approx(full, abs=5e-4)
    assert overhead_partial(job, T_full).total == pytest.approx(naive, abs=5e-4)
    T_partial = interval_partial(job, 0.1)
    assert T_partial == pytest.approx(44.8 * HOUR)
    assert overhead_partial(job, T_partial).total == pytest.approx(partial, abs=5e-5)
    assert partial_wins(job, 0.1)
    assert pls_threshold(job) == pytest.approx(0.0025, abs=2e-4)
    assert expected_pls(job, T_full) == pytest.approx(0.005, abs=2e-4)


@given(jobs(background=True), st.floats(0.01, 100))
def test_full_interval_minimizes_the_overhead(job, factor):
    T_save = interval_full(job)
    assume(job.delay <= T_save * factor <= job.T_total)
    assert overhead_full(job, T_save * factor).total >= overhead_full(job, T_save).total * (1 - 1e-9)


@given(jobs())
def test_threshold_in_closed_form(job):
    """The threshold in closed form, which holds for the paper's synchronous saves."""
    T_full = interval_full(job)
    assume(T_full < job.T_total)
    threshold = pls_threshold(job)
    assert threshold == pytest.approx(
        job.nodes_lost * math.sqrt(job.O_save / (2 * job.T_fail)) / (2 * job.N_emb)
    )
    assert interval_partial(job, threshold) == pytest.approx(T_full / 2)


@given(jobs(background=True) | jobs(background=True, rows=True), st.floats(1.001, 10))
def test_partial_wins_above_the_threshold_only(job, factor):
    threshold = pls_threshold(job)
    assume(threshold * factor <= 1)
    assume(job.O_rows is None or interval_partial(job, threshold * factor) < job.T_total)
    assert partial_wins(job, threshold * factor)
    below = threshold / factor
    assume(below > reachable_pls(job))
    assert not partial_wins(job, below)


@given(jobs(background=True), st.floats(1e-4, 1))
def test_partial_interval_keeps_the_target(job, target):
    assume(target > reachable_pls(job) * 1.001)
    T_save = interval_partial(job, target)
    if T_save == job.T_total:
        assert expected_pls(job, T_save) <= target * (1 + 1e-9)
    else:
        assert expected_pls(job, T_save) == pytest.approx(target)


def test_background_saves_cost_waiting_and_delay():
    job = replace(KAGGLE, blocked_save=3.0)
    T_save = 2 * HOUR
    assert overhead_full(job, T_save).save == pytest.approx(3 / (2 * HOUR))
    assert overhead_full(job, T_save).lost == pytest.approx((HOUR + 333) / (28 * HOUR))
    assert expected_pls(job, T_save) == pytest.approx((HOUR + 333) / (28 * HOUR * 8))
    assert interval_full(replace(KAGGLE, blocked_save=0.001)) == pytest.approx(336 - 0.001)  # storage's limit
    assert replace(KAGGLE, blocked_save=KAGGLE.O_save).delay == KAGGLE.delay == 0


ROWS = replace(KAGGLE, blocked_save=30.0, O_rows=40.0, blocked_rows=2.0, row_share=1 / 8)
"""Eight row saves of 40 s write what a save of everything writes in 336 s; training loses 16 s, not 30."""


def test_row_saves_cost_partial_recovery_only():
    T_save = 2 * HOUR
    assert overhead_full(ROWS, T_save) == overhead_full(replace(KAGGLE, blocked_save=30.0), T_save)
    assert interval_full(ROWS) == interval_full(replace(KAGGLE, blocked_save=30.0))
    assert overhead_partial(ROWS, T_save).save == pytest.approx(16 / (2 * HOUR))


def test_row_save_counts_once_it_is_stored():
    """38 s of training after its moment, not the 306 s of a save of everything."""
    assert expected_pls(ROWS, 2 * HOUR) == pytest.approx((HOUR + 38) / (28 * HOUR * 8))
    assert interval_partial(ROWS, 0.01) == pytest.approx(2 * (0.01 * 8 * 28 * HOUR - 38))


def test_row_saves_are_limited_by_storage():
    """One after the other, all rows are saved once in 8 x 38 s of training."""
    reachable = (4 * 38 + 38) / (28 * HOUR * 8)
    assert reachable_pls(ROWS) == pytest.approx(reachable)
    assert interval_partial(ROWS, reachable * 1.000001) == pytest.approx(304, abs=0.01)


def test_row_saves_of_all_rows_equal_full_saves():
    job = replace(KAGGLE, blocked_save=30.0)
    same = replace(job, O_rows=job.O_save, blocked_rows=30.0, row_share=1.0)
    for formula in (pls_threshold, reachable_pls, interval_full, lambda job: interval_partial(job, 0.1)):
        assert formula(same) == formula(job)
    for formula in (expected_pls, overhead_full, overhead_partial):
        assert formula(same, HOUR) == formula(job, HOUR)


def test_failures_without_lost_memory_lose_no_samples():
    job = replace(KAGGLE, nodes_lost=0)
    assert interval_partial(job, 0.001) == job.T_total
    assert expected_pls(job, HOUR) == 0
    assert expected_pls(replace(KAGGLE, nodes_lost=4), HOUR) == 4 * expected_pls(KAGGLE, HOUR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T_total": -1.0}, "T_total is -1; it must be positive"),
        ({"T_fail": 0.0}, "T_fail is 0; it must be positive"),
        ({"T_fail": math.inf}, "T_fail is inf; it must be positive and finite"),
        ({"O_save": math.nan}, "O_save is nan"),
        ({"O_load": -3.0}, "O_load is -3; it must be 0 or more"),
        ({"O_res": -3.0}, "O_res is -3; it must be 0 or more"),
        ({"N_emb": 0}, "N_emb is 0; it is a number of nodes"),
        ({"N_emb": 2.5}, r"N_emb is 2\.5; it is a number of nodes"),
        ({"nodes_lost": 9.0}, "there are only N_emb = 8"),
        ({"blocked_save": -1.0}, "blocked_save is -1"),
        ({"blocked_save": 400.0}, "is a part"),
        ({"O_save": 57 * HOUR}, "are the units right"),
        ({"O_rows": 0.0}, "O_rows is 0; it must be positive"),
        ({"O_rows": 5.0, "blocked_rows": 6.0}, "blocked_rows .6 s. is longer than O_rows .5 s."),
        ({"O_rows": 5.0, "row_share": 0.0}, "row_share is 0"),
    ],
)
def test_impossible_jobs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(KAGGLE, **change)


@pytest.mark.parametrize("interval", [0, -1, 57 * HOUR, math.nan])
@pytest.mark.parametrize("formula", [expected_pls, overhead_full, overhead_partial])
def test_impossible_intervals_are_refused(formula, interval):
    with pytest.raises(ValueError, match="not longer than the job"):
        formula(KAGGLE, interval)


@pytest.mark.parametrize("target", [0, -0.1, 1.1, math.nan])
def test_impossible_targets_are_refused(target):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        interval_partial(KAGGLE, target)


def test_target_beyond_storage_is_refused_with_the_reachable_one():
    job = replace(KAGGLE, O_save=HOUR, blocked_save=1.0)
    with pytest.raises(ValueError, match=r"expected PLS is 0\.0067"):
        interval_partial(job, 0.006)
    assert interval_partial(job, 0.0068) >= job.delay
