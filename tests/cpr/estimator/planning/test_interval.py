from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpr.estimator.planning.formulas import Job, interval_partial
from cpr.estimator.planning.interval import STORAGE_SAFETY, TOLERANCE, IntervalRule, RunMeasurements

HOUR = 3600.0
RULE = IntervalRule(target_pls=0.1, mean_time_to_failure_s=28 * HOUR)
BEGINNING = RunMeasurements(nodes=8, blocked_s=2.0, save_s=60.0, elapsed_s=0.0)

rules = st.builds(
    IntervalRule,
    target_pls=st.floats(1e-4, 1),
    mean_time_to_failure_s=st.floats(60, 1e7),
    max_overhead=st.floats(1e-4, 0.1),
)


@st.composite
def measurements(draw):
    save_s = draw(st.floats(1e-3, 1e4))
    return RunMeasurements(
        nodes=draw(st.integers(1, 10_000)),
        blocked_s=save_s * draw(st.floats(0, 1)),
        save_s=save_s,
        elapsed_s=draw(st.floats(0, 1e7)),
        share=draw(st.floats(0.01, 1)),
        nodes_lost=draw(st.floats(0, 100)),
        pls=draw(st.floats(0, 0.2)),
        share_left=draw(st.floats(0, 1)),
    )


def test_cheap_saves_are_limited_by_the_overhead():
    choice = RULE.next_interval(BEGINNING)
    assert choice.interval_s == pytest.approx(2.0 / 0.001)
    assert choice.changed
    assert "a save costs 2 s, 0.1% of training time" in choice.reason


def test_free_saves_are_limited_by_storage():
    choice = RULE.next_interval(replace(BEGINNING, blocked_s=0.001))
    assert choice.interval_s == 60 * STORAGE_SAFETY
    assert "storage takes 1 min" in choice.reason


def test_expensive_saves_are_as_rare_as_the_target_allows():
    """At the start of a run with synchronous saves, this is the paper's interval."""
    measured = replace(BEGINNING, blocked_s=336.0, save_s=336.0)
    choice = RULE.next_interval(measured)
    job = Job(T_total=56 * HOUR, T_fail=28 * HOUR, O_save=336.0, O_load=0, O_res=0, N_emb=8)
    assert choice.interval_s == pytest.approx(interval_partial(job, 0.1))
    assert choice.expected_pls == pytest.approx(0.1)
    assert "the target PLS of 0.1 asks for it" in choice.reason


def test_each_row_save_counts_once_it_is_stored():
    """1/8 of the rows in 0.6 s each, of which training loses 0.2 s: PLS grows by 0.4 s of training a loss."""
    rows = replace(BEGINNING, blocked_s=8 * 0.2, save_s=8 * 0.6, share=1 / 8)
    whole = replace(rows, share=1.0)
    assert (rows.delay_s, whole.delay_s) == (pytest.approx(0.4), pytest.approx(3.2))
    of_rows, of_whole = (RULE.next_interval(each) for each in (rows, whole))
    assert of_rows.interval_s == of_whole.interval_s == pytest.approx(1600.0)
    assert of_rows.expected_pls == pytest.approx(800.4 / (28 * HOUR * 8))
    assert of_whole.expected_pls == pytest.approx(803.2 / (28 * HOUR * 8))
    often = replace(rows, blocked_s=0.0)
    assert RULE.next_interval(often).interval_s == 8 * 0.6 * STORAGE_SAFETY  # storage takes them all


def test_unreachable_target_is_limited_by_storage():
    measured = replace(BEGINNING, save_s=300.0, elapsed_s=3 * HOUR, nodes_lost=30.0, pls=0.09, share_left=0.9)
    choice = RULE.next_interval(measured)
    assert choice.interval_s == 300 * STORAGE_SAFETY
    assert choice.expected_pls > RULE.target_pls
    assert "the target PLS of 0.1 asks for more" in choice.reason


def test_observed_loss_weighs_as_much_as_the_prior_one():
    assert RULE.time_to_loss_s(BEGINNING) == 28 * HOUR
    assert RULE.time_to_loss_s(replace(BEGINNING, elapsed_s=28 * HOUR)) == 56 * HOUR
    assert RULE.time_to_loss_s(replace(BEGINNING, elapsed_s=2 * HOUR, nodes_lost=2.0)) == 10 * HOUR


def test_no_choice_without_a_prior_and_without_losses():
    rule = IntervalRule()
    with pytest.raises(ValueError, match="give mean_time_to_failure_s"):
        rule.next_interval(BEGINNING)
    assert rule.time_to_loss_s(replace(BEGINNING, elapsed_s=HOUR, nodes_lost=4.0)) == HOUR / 4


@pytest.mark.parametrize("pls", [0.0, 0.2], ids=["storage is the limit", "the target is exceeded"])
def test_jitter_of_storage_keeps_the_interval(pls):
    now = RULE.next_interval(replace(BEGINNING, blocked_s=0.001, pls=pls))
    for save_s in (61.0, 59.5, 62.0, 58.0, 70.0, 60.5):
        again = RULE.next_interval(
            replace(BEGINNING, blocked_s=0.001, save_s=save_s, pls=pls), now.interval_s
        )
        assert (again.changed, again.interval_s) == (False, now.interval_s), save_s
    slower = RULE.next_interval(replace(BEGINNING, blocked_s=0.001, save_s=80.0, pls=pls), now.interval_s)
    assert slower.interval_s == 80 * STORAGE_SAFETY


@given(rules, measurements(), st.none() | st.floats(1, 1e6))
@example(  # next to no samples are left
    IntervalRule(target_pls=0.125, mean_time_to_failure_s=60.0, max_overhead=0.0625),
    RunMeasurements(nodes=1, blocked_s=1.0, save_s=1.0, elapsed_s=0.0, pls=0.1875, share_left=5e-324),
    None,
)
def test_properties_of_every_choice(rule, measured, current_s):
    choice = rule.next_interval(measured, current_s)
    shortest_s = measured.save_s * STORAGE_SAFETY
    assert choice.interval_s > measured.save_s  # never faster than storage
    assert choice.interval_s >= shortest_s or not choice.changed
    if choice.expected_pls > rule.target_pls * (1 + 1e-6) and measured.share_left > 0:
        # never less often than the target asks for, but where storage cannot do it
        assert rule.next_interval(measured).interval_s == shortest_s
        assert abs(choice.interval_s - shortest_s) <= TOLERANCE * choice.interval_s
    if choice.interval_s > shortest_s and choice.changed:  # as often as may be
        assert choice.interval_s <= measured.blocked_s / rule.max_overhead * (1 + 1e-9)
    assert choice.changed == (choice.interval_s != current_s)


@given(rules, measurements(), st.floats(1, 1e6))
def test_choice_is_stable(rule, measured, current_s):
    settled = rule.next_interval(measured, current_s).interval_s
    assert not rule.next_interval(measured, settled).changed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntervalRule(target_pls=1.5), "above 0 and at most 1"),
        (lambda: IntervalRule(max_overhead=0.0), "max_overhead is 0"),
        (lambda: IntervalRule(max_overhead=1.0), "max_overhead is 1"),
        (lambda: IntervalRule(mean_time_to_failure_s=-5.0), "must be positive"),
        (lambda: replace(BEGINNING, blocked_s=-1.0), "impossible: .*blocked_s=-1"),
        (lambda: replace(BEGINNING, save_s=float("nan")), "impossible"),
        (lambda: replace(BEGINNING, save_s=0), "impossible"),
        (lambda: replace(BEGINNING, nodes=0), "impossible"),
        (lambda: replace(BEGINNING, share_left=1.1), "impossible"),
        (lambda: replace(BEGINNING, share=0.0), "impossible"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
