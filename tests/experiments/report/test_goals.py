"""The value decides whether a goal was reached, and its range how firmly."""

import pytest

from experiments.report.goals import GOALS, Goal, Outcome, Sense, outcomes
from experiments.report.results import FigureValue, read_results


@pytest.mark.parametrize(
    ("sense", "value", "low", "high", "outcome"),
    [
        (Sense.AT_LEAST, 2.0, None, None, Outcome.REACHED),
        (Sense.AT_LEAST, 1.9, None, None, Outcome.MISSED),
        (Sense.AT_LEAST, 2.5, 2.0, 3.0, Outcome.REACHED),
        (Sense.AT_LEAST, 2.5, 1.9, 3.0, Outcome.REACHED_IN_PART),
        (Sense.AT_LEAST, 1.5, 1.4, 2.1, Outcome.MISSED_IN_PART),
        (Sense.AT_MOST, 1.5, 1.4, 2.1, Outcome.REACHED_IN_PART),
        (Sense.AT_MOST, 2.5, 2.1, 3.0, Outcome.MISSED),
        (Sense.WITHIN, -2.0, -2.0, 2.0, Outcome.REACHED),
        (Sense.WITHIN, 2.5, -9.0, 9.0, Outcome.MISSED_IN_PART),
        (Sense.WITHIN, None, None, None, Outcome.OPEN),
        (Sense.NOT_WORSE, -1.0, -1.9, -0.1, Outcome.REACHED),
        (Sense.NOT_WORSE, -1.0, -2.1, 0.1, Outcome.NOT_SHOWN),
        (Sense.NOT_WORSE, 1.0, -9.0, 11.0, Outcome.NOT_SHOWN),
        (Sense.NOT_WORSE, -3.0, -3.5, -2.5, Outcome.MISSED),
    ],
)
def test_outcomes(sense, value, low, high, outcome):
    goal = Goal(experiment="speed", figure="a", sense=sense, limit=2.0)
    assert goal.outcome(FigureValue(value=value, low=low, high=high)) is outcome


def test_a_goal_reads_as_it_was_set():
    assert str(Goal(experiment="x", figure="a", sense=Sense.WITHIN, limit=0.0005)) == "within ± 0.0005"
    goal = Goal(experiment="x", figure="a", sense=Sense.AT_MOST, limit=1 / 6, where="on 4 workers")
    assert str(goal) == "at most 0.167 (on 4 workers)"


def test_no_goal_is_set_twice():
    names = [(goal.experiment, goal.figure) for goal in GOALS]
    assert len(names) == len(set(names))


def test_only_finished_experiments_have_an_outcome(store, tmp_path):
    store("caching", {"second_epoch_speedup": 7.0, "first_epoch_ratio": 1.5})
    store("precision")
    found = outcomes(read_results(tmp_path))
    assert [(goal.figure, measured.value, outcome) for goal, measured, outcome in found] == [
        ("second_epoch_speedup", 7.0, Outcome.REACHED),
        ("first_epoch_ratio", 1.5, Outcome.MISSED),
    ]


def test_a_goal_for_a_figure_that_a_result_lacks_is_an_error(store, tmp_path):
    store("caching", {"first_epoch_ratio": 1.5})
    with pytest.raises(ValueError, match="caching has no figure 'second_epoch_speedup'"):
        outcomes(read_results(tmp_path))
