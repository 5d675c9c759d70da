"""The value decides what became of a goal, and its range how firmly."""

import pytest

from experiments.harness.record import Record
from experiments.report.goals import GOALS, Goal, Sense, Verdict, outcomes
from experiments.report.results import Measured, read_results


@pytest.mark.parametrize(
    ("sense", "value", "low", "high", "verdict"),
    [
        (Sense.AT_LEAST, 2.0, None, None, Verdict.MET),
        (Sense.AT_LEAST, 1.9, None, None, Verdict.MISSED),
        (Sense.AT_LEAST, 2.5, 2.0, 3.0, Verdict.MET),
        (Sense.AT_LEAST, 2.5, 1.9, 3.0, Verdict.MET_IN_PART),
        (Sense.AT_LEAST, 1.5, 1.4, 2.1, Verdict.MISSED_IN_PART),
        (Sense.AT_LEAST, 1.5, 1.4, 1.9, Verdict.MISSED),
        (Sense.AT_MOST, 2.0, 1.0, 2.0, Verdict.MET),
        (Sense.AT_MOST, 1.5, 1.4, 2.1, Verdict.MET_IN_PART),
        (Sense.AT_MOST, 2.5, 1.9, 3.0, Verdict.MISSED_IN_PART),
        (Sense.AT_MOST, 2.5, 2.1, 3.0, Verdict.MISSED),
        (Sense.WITHIN, -2.0, -2.0, 2.0, Verdict.MET),
        (Sense.WITHIN, 0.0, -3.0, 3.0, Verdict.MET_IN_PART),
        (Sense.WITHIN, 2.5, -9.0, 9.0, Verdict.MISSED_IN_PART),
        (Sense.WITHIN, -2.5, -3.0, -2.1, Verdict.MISSED),
        (Sense.WITHIN, None, None, None, Verdict.OPEN),
        (Sense.NOT_CLEARLY_BELOW, 1.9, 1.7, 2.1, Verdict.MET),
        (Sense.NOT_CLEARLY_BELOW, 3.0, 2.9, 3.1, Verdict.MET),
        (Sense.NOT_CLEARLY_BELOW, 1.9, 1.85, 1.95, Verdict.MISSED),
        (Sense.NOT_CLEARLY_ABOVE, 2.1, 1.9, 2.3, Verdict.MET),
        (Sense.NOT_CLEARLY_ABOVE, 1.0, 0.9, 1.1, Verdict.MET),
        (Sense.NOT_CLEARLY_ABOVE, 2.1, 2.05, 2.15, Verdict.MISSED),
    ],
)
def test_verdicts(sense, value, low, high, verdict):
    goal = Goal(experiment="speed", figure="a", sense=sense, limit=2.0)
    assert goal.verdict(Measured(value=value, low=low, high=high)) is verdict


def test_a_goal_reads_as_it_was_set():
    assert str(Goal(experiment="x", figure="a", sense=Sense.WITHIN, limit=0.0005)) == "within ± 0.0005"
    goal = Goal(experiment="x", figure="a", sense=Sense.AT_MOST, limit=1 / 6, where="on 4 workers")
    assert str(goal) == "at most 0.167 (on 4 workers)"


def test_no_goal_is_set_twice():
    names = [(goal.experiment, goal.figure) for goal in GOALS]
    assert len(names) == len(set(names))


def test_only_finished_experiments_have_an_outcome(tmp_path):
    record = Record("caching", {}, seeds=[1], folder=tmp_path)
    record.finish({"second_epoch_speedup": 7.0, "first_epoch_ratio": 1.5})
    Record("precision", {}, seeds=[1], folder=tmp_path).measure("a", lambda: {"auc": 0.5})
    found = outcomes(read_results(tmp_path))
    assert [(goal.figure, measured.value, verdict) for goal, measured, verdict in found] == [
        ("second_epoch_speedup", 7.0, Verdict.MET),
        ("first_epoch_ratio", 1.5, Verdict.MISSED),
    ]
    assert [verdict.is_short for *_, verdict in found] == [False, True]


def test_a_goal_for_a_figure_that_a_result_lacks_is_an_error(tmp_path):
    Record("caching", {}, seeds=[1], folder=tmp_path).finish({"first_epoch_ratio": 1.5})
    with pytest.raises(ValueError, match="caching has no figure 'second_epoch_speedup'"):
        outcomes(read_results(tmp_path))
