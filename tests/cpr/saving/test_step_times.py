"""What steps during saves tell of their cost."""

from types import SimpleNamespace

import pytest

from cpr.saving.history_writer import FAR_LONGER, ConcurrentSave, StepTimes

STEP_S = 2.0


@pytest.fixture
def steps():
    steps = StepTimes()
    for took_s in (1.9, 2.1, 2.0):
        steps.note(took_s, [])
    return steps


def under_way(blocked_s=0.0):
    return ConcurrentSave(SimpleNamespace(blocked_s=blocked_s, longest_blocked_s=0.0), 7)


def cost_s(during):
    return during.blocked_s + during.slowed_s


def test_steps_during_a_save_are_no_measure_of_steps_without(steps):
    save = under_way()
    for _ in range(20):
        steps.note(3.0, [save])
    assert steps.median_s == STEP_S
    assert save.slowed_s == pytest.approx(20.0)


def test_what_training_waited_and_what_it_was_slowed_down_are_apart(steps):
    save = under_way(blocked_s=0.5)
    steps.note(3.0, [save])
    save.save.blocked_s = 0.75
    steps.note(2.5, [save])
    assert (save.blocked_s, save.slowed_s) == (0.75, pytest.approx(0.5 + 0.25))


def test_a_step_with_something_else_in_it_is_no_cost_of_the_save(steps):
    save = under_way(blocked_s=0.5)
    steps.note(3.5, [save])
    steps.note(STEP_S * FAR_LONGER + 100.0, [save])
    assert cost_s(save) == pytest.approx(1.5)
    steps.note(STEP_S * FAR_LONGER + 100.0, [])
    assert under_way().slowed_s is None
    again = under_way()
    steps.note(STEP_S, [again])
    assert again.slowed_s == pytest.approx(0.0)


def test_time_that_training_waited_makes_no_step_far_longer(steps):
    save = under_way(blocked_s=40.0)
    steps.note(43.0, [save])
    assert cost_s(save) == pytest.approx(41.0)


@pytest.mark.parametrize("waited_s", [3.0, 400.0], ids=["in a longer step", "in one that is far longer"])
def test_what_another_rank_waited_counts_once(steps, waited_s):
    """This rank waits for the other one in its next step, and knows the reason only when all is committed."""
    save = under_way(blocked_s=0.5)
    steps.note(STEP_S + 0.5 + waited_s, [save])
    steps.note(STEP_S + 1.0, [save])
    save.save.longest_blocked_s = 0.5 + waited_s
    assert save.blocked_s == 0.5 + waited_s
    assert cost_s(save) == pytest.approx(0.5 + waited_s + 1.0)


def test_saves_side_by_side_share(steps):
    one, two = under_way(blocked_s=0.5), under_way(blocked_s=0.25)
    steps.note(3.75, [one, two])
    assert [one.slowed_s, two.slowed_s] == [pytest.approx(0.5), pytest.approx(0.5)]
