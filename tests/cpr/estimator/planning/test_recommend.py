import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpr.estimator.failures.log import FailureLog, Stretch
from cpr.estimator.failures.log_report import report_on
from cpr.estimator.planning.estimator_inputs import EstimatorInputs
from cpr.estimator.planning.formulas import Job, interval_full, interval_partial, partial_wins, reachable_pls
from cpr.estimator.planning.interval import IntervalRule, RunMeasurements
from cpr.estimator.planning.recommend import recommend, with_save_time
from cpr.estimator.planning.recommend_text import as_text
from tests.cpr.estimator.planning.jobs import HOUR, KAGGLE, MINUTE, jobs

any_jobs = jobs() | jobs(background=True) | jobs(background=True, rows=True)
any_jobs |= any_jobs.map(lambda job: replace(job, nodes_lost=0.0))


def test_recommendation_in_the_setting_of_the_paper():
    what = recommend(KAGGLE, 0.1)
    assert what.is_partial
    assert what.chosen is what.partial
    assert what.chosen.interval_s == pytest.approx(44.8 * HOUR)
    assert what.row_interval_s == pytest.approx(5.6 * HOUR)
    assert what.chosen.overhead.total == pytest.approx(0.0053, abs=5e-5)
    assert what.naive.overhead.total == pytest.approx(0.0441, abs=5e-4)
    assert what.gain == pytest.approx(0.085 - 0.0053, abs=5e-4)


@given(any_jobs, st.floats(1e-5, 1))
def test_properties_of_every_recommendation(job, target):
    what = recommend(job, target)
    assert what.is_partial == (target >= reachable_pls(job) and partial_wins(job, target))
    assert what.full.interval_s == interval_full(job)
    if what.partial is None:
        assert not what.is_partial
        return
    assert what.partial.interval_s <= interval_partial(job, target)
    assert what.partial.expected_pls <= target * (1 + 1e-9)
    if what.is_partial:  # more saves than the paper's, but never at a loss
        assert what.gain > 0
    assert what.chosen.overhead.total <= what.full.overhead.total


@given(any_jobs, st.floats(1e-5, 1))
def test_decision_changes_at_the_thresholds(job, target):
    what = recommend(job, target)
    bounds = what.thresholds
    step = 1 - 1e-6 if what.is_partial else 1 + 1e-6
    if bounds.pls is None:
        assert not what.is_partial
    elif reachable_pls(job) < bounds.pls * step <= 1:
        assert recommend(job, bounds.pls * step).is_partial != what.is_partial
    if bounds.T_fail is not None:
        assert recommend(replace(job, T_fail=bounds.T_fail * step), target).is_partial != what.is_partial
        assert recommend(replace(job, T_fail=bounds.T_fail / step), target).is_partial == what.is_partial
    if bounds.O_save is not None:
        assume(job.O_save < job.T_total / 2)
        for factor, same in ((1 / step, False), (step, True)):
            O_save = min(bounds.O_save * factor, job.T_total)  # noqa: N806
            other = recommend(with_save_time(job, O_save), target)
            assert (other.is_partial == what.is_partial) == same


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1])
def test_impossible_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="a share of the rows"):
        recommend(KAGGLE, 0.1, ratio)


def text_of(job, target=0.1, ratio=0.125, failures=None):
    inputs = EstimatorInputs(job=job, sources={"T_fail": "given"})
    return " ".join(as_text(recommend(job, target, ratio), inputs, failures).split())


def test_text_names_the_thresholds():
    assert "A target PLS below 0.0026 (now 0.1): then full recovery is the choice" in text_of(KAGGLE)
    strict = text_of(KAGGLE, 0.001)
    assert "A target PLS above 0.0026 (now 0.001): then partial recovery is the choice" in strict
    assert "A failure each 7.6 d or less often (now each 28 h): then partial recovery is the choice" in strict
    assert "A save that takes less than 51.6 s (now 5.6 min): then partial recovery is the choice" in strict
    assert "--blocked 3.36s" in text_of(KAGGLE)


def test_threshold_of_an_unreachable_target_is_not_called_cheaper():
    """Saves that cost nothing: partial recovery is always the cheaper one, but cannot keep every target."""
    job = replace(KAGGLE, O_save=10 * MINUTE, blocked_save=0.0)
    text = text_of(job)
    assert "A target PLS below 0.0011 (now 0.1): then full recovery is the choice." in text
    assert "is cheaper" not in text
    assert "cannot keep a PLS of 0.001: " in text_of(job, 0.001)


def test_text_on_background_saves():
    job = replace(KAGGLE, blocked_save=3.0)
    assert (
        "one takes 5.6 min and costs training 3 s. What partial recovery still gains then is 1% of training"
        in text_of(job)
    )
    assert "Saves are cheap here. Coming each 50 min they cost 0.1%" in text_of(job)
    nearly_free = replace(KAGGLE, O_save=1.0, blocked_save=0.01)
    assert "Full recovery loses no samples" in text_of(nearly_free)


MEASURED = Job(T_total=10 * HOUR, T_fail=1000.0, O_save=2.82, O_load=0, O_res=0, N_emb=2, blocked_save=0.39)
"""A save of everything as `experiments.checkpointing` measured it, and many failures."""
PRIORITY = replace(MEASURED, O_rows=0.62, blocked_rows=0.0079, row_share=1 / 8)
"""The same with the row saves measured there: all rows once take longer, and cost training less."""


def test_full_recovery_pays_for_full_saves_where_partial_recovery_saves_rows():
    """As if both saved rows, full recovery seems cheaper by half, and a row save late by all of them."""
    of_rows = replace(MEASURED, O_save=8 * 0.62, blocked_save=8 * 0.0079)
    what, fault = recommend(PRIORITY, 0.003), recommend(of_rows, 0.003)
    assert what.full == recommend(MEASURED, 0.003).full
    assert what.full.overhead.total == pytest.approx(0.03036, abs=1e-5)
    assert fault.full.overhead.total == pytest.approx(0.01614, abs=1e-5)
    assert (what.is_partial, fault.is_partial) == (True, False)
    assert "one takes 2.82 s and costs training 390 ms; row saves, of 12.5% of the rows each" in text_of(
        PRIORITY, 0.003
    )


@pytest.mark.parametrize(
    ("nodes_lost", "each", "taken"),
    [(2.0, "14 h", "2 nodes"), (1.0, "28 h", "1 node"), (0.5, "56 h", "0.5 nodes")],
)
def test_text_has_the_time_between_losses_of_a_node(nodes_lost, each, taken):
    """An interval that a run chooses with it, knowing nothing else, is the one that is recommended here."""
    job = replace(KAGGLE, nodes_lost=nodes_lost)
    assert f"A node is lost each {each}: failures come each 28 h and take {taken} on" in text_of(job)
    what = recommend(job, 0.1)
    rule = IntervalRule(target_pls=0.1, mean_time_to_failure_s=what.to_json()["time_to_loss_s"])
    measured = RunMeasurements(nodes=job.N_emb, blocked_s=job.O_save, save_s=job.O_save, elapsed_s=0.0)
    choice = rule.next_interval(measured)
    assert min(choice.interval_s, job.T_total) == pytest.approx(what.chosen.interval_s)
    assert recommend(replace(job, nodes_lost=0.0)).to_json()["time_to_loss_s"] is None


@pytest.mark.parametrize(
    ("job", "target", "sentence"),
    [
        (KAGGLE, 0.1, "That is 1.2 saves in the whole job"),
        (KAGGLE, 0.1, "sets 12.5% of the rows back by 22.4 h"),
        (replace(KAGGLE, O_res=5 * HOUR), 0.1, "`cpr simulate`"),
        (
            replace(KAGGLE, O_save=2 * HOUR, blocked_save=1.0, N_emb=2),
            0.01,
            "cannot keep a PLS of 0.01: a save counts only 2 h after its start",
        ),
        (
            Job(T_total=560 * HOUR, T_fail=HOUR, O_save=300, O_load=0, O_res=0, N_emb=2, blocked_save=120),
            0.04,
            "What partial recovery still gains then is nothing.",
        ),
    ],
    ids=["few saves", "rows set back", "inaccurate formulas", "unreachable target", "a loss"],
)
def test_text_warns(job, target, sentence):
    text = text_of(job, target)
    assert sentence in text
    assert not re.search(r"-\d", text)


def test_text_for_failures_without_lost_memory():
    text = text_of(replace(KAGGLE, nodes_lost=0.0))
    assert "and a PLS of 0." in text
    assert "A target PLS" not in text
    assert "No failure that was seen lost any memory" in text
    assert "One lost node would add a PLS of 0.062 on average" in text


def test_text_tells_whether_the_decision_is_certain():
    few = report_on(FailureLog((Stretch((20 * HOUR, 36 * HOUR)),)))
    assert "Anywhere in that range the decision is the same." in text_of(KAGGLE, failures=few)
    near = recommend(KAGGLE, 0.1).thresholds.pls * 1.1
    assert "So the decision is not certain: it turns at 23.1 h" in text_of(KAGGLE, near, failures=few)


def test_text_for_a_log_that_contradicts_the_decision():
    """Whether `T_fail`, which is given, lies above all that the log allows, or below."""
    often = report_on(FailureLog((Stretch((3 * HOUR, 5 * HOUR, HOUR)),)))
    text = text_of(replace(KAGGLE, T_fail=1e5 * HOUR), 0.0005, failures=often)
    assert text.startswith("Partial recovery")
    assert "the decision is the same" not in text
    assert "In that range the decision is the other one: it rests on a failure each" in text
    seldom = report_on(FailureLog((Stretch((), 1e5 * HOUR),)))
    text = text_of(replace(KAGGLE, T_fail=5 * HOUR), 0.0005, failures=seldom)
    assert text.startswith("Full recovery")
    assert "In that range the decision is the other one: it rests on a failure each 5 h" in text
