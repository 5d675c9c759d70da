"""Schedules have the same ordered events for the same seed, at the given rate."""

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpr.faults import AtRate, AtStep, AtTime, DamageFile, Event, Hang, KillWorker, Raise, Slow, Trace
from tests.cpr.faults.strategies import rates, schedules


def moments(schedule, number=200):
    return [event.time_s if event.step is None else event.step for event in islice(schedule, number)]


@given(schedule=schedules)
def test_schedule_is_ordered_and_reproducible(schedule):
    events = list(islice(schedule, 50))
    assert list(islice(schedule, 50)) == events
    assert moments(schedule, 50) == sorted(moments(schedule, 50))
    assert {event.counts_steps for event in events} <= {schedule.counts_steps}
    assert {event.kind for event in events} <= set(schedule.kinds_used)


@given(rate=rates, seed=st.integers(0, 2**32))
def test_events_depend_on_the_seed(rate, seed):
    other = AtRate(**{**vars(rate), "seed": seed, "num_events": 20})
    same = AtRate(**{**vars(rate), "num_events": 20})
    assert (list(other) == list(same)) == (seed == rate.seed)


def test_events_of_a_seed_are_the_same_on_every_machine():
    rate = AtRate(kinds=(KillWorker(), Hang()), seed=7, mean_s=60.0, distribution="weibull", shape=0.7)
    # as Python 3.11 draws them; other versions and machines must not differ
    assert [(round(event.time_s, 3), event.kind.name, event.target_of(4)) for event in islice(rate, 4)] == [
        (12.407, "kill_worker", 1),
        (63.401, "kill_worker", 1),
        (95.888, "hang", 3),
        (96.734, "kill_worker", 1),
    ]


NUM_DRAWS = 4000
ALPHA = 1e-9
"""Of each comparison with scipy: with 60 of them, a false alarm in sixteen million runs of this file."""
OF_SCIPY = {
    "exponential": lambda shape, **scale: stats.expon(**scale),
    "gamma": stats.gamma,
    "weibull": stats.weibull_min,
}


@settings(max_examples=60)
@given(
    distribution=st.sampled_from(list(OF_SCIPY)),
    shape=st.floats(0.5, 20),
    seed=st.integers(0, 2**32),
)
def test_times_have_the_optionsmean_and_distribution(distribution, shape, seed):
    options = {"distribution": distribution, "shape": shape, "seed": seed, "num_events": NUM_DRAWS}
    by_time = moments(AtRate(kinds=(Raise(),), mean_s=30.0, **options), NUM_DRAWS)
    by_step = moments(AtRate(kinds=(Raise(),), mean_steps=30.0, **options), NUM_DRAWS)
    gaps = np.diff(by_time, prepend=0.0)
    family = OF_SCIPY[distribution]
    expected = family(shape, scale=30.0 / family(shape).mean())
    assert stats.kstest(gaps, expected.cdf).pvalue > ALPHA
    # The mean of so many draws is close to normal (skewness is 6.6 at most, for weibull at 0.5): 7 of its
    # standard deviations leave room for that.
    assert abs(gaps.mean() - 30.0) < 7 * expected.std() / math.sqrt(NUM_DRAWS)
    assert by_step == [math.ceil(moment) for moment in by_time]  # the same draws, rounded up


def test_kinds_are_equally_likely_and_so_are_targets():
    rate = AtRate(kinds=(Raise(), KillWorker(), KillWorker()), seed=3, mean_s=1.0, num_events=3000)
    kills = sum(event.kind == KillWorker() for event in rate)
    hits = sum(event.target_of(4) == 2 for event in rate)
    # Binomial: standard deviations are 25.8 and 23.7; 6 of them.
    assert abs(kills - 2000) < 155
    assert abs(hits - 750) < 142
    assert {event.target_of(4) for event in rate} == set(range(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AtStep(step=-1, kind=Raise()), "start at 0"),
        (lambda: AtTime(time_s=float("nan"), kind=Raise()), "start at 0"),
        (lambda: AtStep(step=1, kind=Raise(), target=-1), "target is -1"),
        (lambda: AtRate(kinds=(), seed=1, mean_s=1), "at least one kind"),
        (lambda: AtRate(kinds=(Raise(),), seed=1), "mean_s or mean_steps"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, mean_steps=1), "mean_s or mean_steps"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=0), "positive"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, num_events=-1), "num_events"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, distribution="pareto"), "exponential, gamma, we"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, distribution="gamma", shape=0), "shape is 0"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, target=-2), "target is -2"),
        (
            lambda: Trace(events=(Event(kind=Raise(), step=1), Event(kind=Raise(), time_s=1))),
            "two traces",
        ),
        (lambda: AtStep(kind=Raise()), "one of the two"),
        (lambda: Event(kind=Raise(), step=1, time_s=1), "one of the two"),
        (lambda: Hang(duration_s=0), "duration_s"),
        (lambda: Slow(num_steps=3), "nothing makes this worker slow"),
        (lambda: Slow(num_steps=3, factor=0.5), "at least 1"),
        (lambda: DamageFile(how="burn"), "flip"),
    ],
)
def test_invalid_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
