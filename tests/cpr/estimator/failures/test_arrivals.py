"""Simulated failures have the rate, the distribution and the targets of their model."""

import math

import numpy as np
import pytest
from scipy import stats

from cpr.estimator.failures.arrivals import FailureModel, JobClock, NodeClock
from cpr.estimator.simulation.simulation import Mean

RECORDED_S = (1.0, 2.0, 2.0, 15.0)
MODELS = {
    "exponential": FailureModel(),
    "bursts": FailureModel(distribution="gamma", shape=0.4),
    "regular": FailureModel(distribution="gamma", shape=9.0),
    "weibull": FailureModel(distribution="weibull", shape=0.7),
    "recorded": FailureModel(distribution="recorded", recorded_s=RECORDED_S),
}
FROZEN = {  # what is drawn, in units of its mean
    "exponential": stats.expon(),
    "bursts": stats.gamma(0.4, scale=1 / 0.4),
    "regular": stats.gamma(9, scale=1 / 9),
    "weibull": stats.weibull_min(0.7, scale=1 / math.gamma(1 + 1 / 0.7)),
}


def agrees(values, expected):
    """Whether a mean is within twice its 95 % interval; wrong by chance once in 10,000 times."""
    mean = Mean.of(values)
    return abs(mean.value - expected) <= 2 * mean.half_width


def draw_failures(clock, times):
    """Draw failures of each run: times and nodes, [runs, times]."""
    failures = [clock.next() for _ in range(times)]
    return np.stack([each.at_s for each in failures], 1), np.stack([each.node for each in failures], 1)


def seed(number=0):
    return np.random.SeedSequence(number)


@pytest.mark.parametrize("name", FROZEN)
def test_draws_follow_the_distribution(name):
    values = MODELS[name].draw(np.random.default_rng(1), 20_000)
    assert stats.kstest(values, FROZEN[name].cdf).pvalue > 1e-3
    assert agrees(values, 1)


@pytest.mark.parametrize("name", FROZEN)
def test_remaining_times_follow_the_stationary_process(name):
    """Its density is the chance that a time between failures is longer, over the mean."""
    remaining = MODELS[name].draw_remaining(np.random.default_rng(2), 20_000)
    second_moment = FROZEN[name].moment(2)
    assert agrees(remaining, second_moment / 2)
    moments = np.quantile(remaining, [0.1, 0.5, 0.9])
    for moment in moments:
        grid = np.linspace(0, moment, 20_001)[1:]
        expected = FROZEN[name].sf(grid).mean() * moment
        assert agrees(remaining <= moment, expected)


def test_recorded_times_are_drawn_in_units_of_their_mean():
    values = MODELS["recorded"].draw(np.random.default_rng(3), 10_000)
    assert set(values) == {0.2, 0.4, 3.0}
    assert agrees(values == 0.4, 0.5)
    remaining = MODELS["recorded"].draw_remaining(np.random.default_rng(4), 10_000)
    assert agrees(remaining, np.square(RECORDED_S).mean() / 2 / 5**2)
    assert agrees(remaining > 0.4, 0.75 * 2.6 / 3)


@pytest.mark.parametrize("name", MODELS)
def test_a_job_fails_at_its_mean_time(name):
    moments, nodes = draw_failures(JobClock(MODELS[name], 50.0, 4, 3000, seed()), 20)
    gaps = np.diff(moments, axis=1, prepend=0)
    assert (gaps > 0).all()
    assert agrees(gaps[:, 0], 50)  # the clock begins with the run
    assert agrees(gaps.ravel(), 50)
    assert stats.chisquare(np.bincount(nodes.ravel())).pvalue > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_nodes_fail_at_their_mean_time_from_the_beginning(name):
    """In the middle of their lives: in any span of time as many as in any other."""
    moments, nodes = draw_failures(NodeClock(MODELS[name], 50.0, 4, 3000, seed()), 200)
    assert (np.diff(moments, axis=1) >= 0).all()
    for begin_s in (0, 20, 3000):
        inside = (begin_s <= moments) & (moments < begin_s + 200)
        assert agrees(inside.sum(axis=1), 200 / 50)
    for node in range(4):
        assert agrees(((nodes == node) & (moments < 200)).sum(axis=1), 1)


def test_each_node_has_its_own_clock():
    """With clocks that ring regularly, every node waits its own mean, three times that of the job."""
    moments, nodes = draw_failures(
        NodeClock(FailureModel(distribution="gamma", shape=100), 10.0, 3, 200, seed()), 300
    )
    gaps = np.concatenate(
        [np.diff(moments[run, nodes[run] == node]) for run in range(200) for node in range(3)]
    )
    assert agrees(gaps, 30)
    assert gaps.std() == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("clock", [JobClock, NodeClock])
def test_the_same_seed_draws_the_same_failures(clock):
    def of(number):
        return draw_failures(clock(MODELS["weibull"], 10.0, 5, 7, seed(number)), 30)

    assert all(np.array_equal(one, other) for one, other in zip(of(1), of(1), strict=True))
    assert not np.array_equal(of(1)[0], of(2)[0])


def test_group_failures_take_several_nodes():
    clock = JobClock(FailureModel(group_share=0.25, group_nodes=3), 10.0, 8, 2000, seed())
    sizes = np.stack([clock.next().num_nodes for _ in range(5)])
    assert set(np.unique(sizes)) == {1, 3}
    assert agrees(sizes.ravel() == 3, 0.25)
    assert FailureModel(group_share=0.25, group_nodes=3).mean_nodes == 1.5


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"distribution": "normal"}, "choose one of exponential, gamma, weibull, recorded"),
        ({"scope": "rack"}, "scope is 'rack'; choose one of job, node"),
        ({"distribution": "gamma", "shape": 0.0}, "shape is 0; it must be from 0.1 to 100"),
        ({"distribution": "gamma", "shape": math.nan}, "shape must be finite, not nan"),
        ({"distribution": "recorded"}, "give both or neither"),
        ({"recorded_s": (1.0,)}, "give both or neither"),
        ({"distribution": "recorded", "recorded_s": (1.0, 0.0)}, "must be positive"),
        ({"group_share": 1.5}, "from 0 to 1"),
        ({"group_nodes": 0}, "1 node at least"),
    ],
)
def test_impossible_models_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        FailureModel(**values)
