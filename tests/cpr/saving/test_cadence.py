"""When saves are due."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cpr.checkpoint.collectives import Alone
from cpr.estimator.history import SAVES_FOLLOWED, SAVES_KEPT, FailureCost, RunHistory, SaveCost
from cpr.estimator.planning.interval import IntervalRule
from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import FIRST_STEPS, AutoPace, FixedPace

RULE = IntervalRule(target_pls=0.1, mean_time_to_failure_s=3600.0, max_overhead=0.001)


@pytest.mark.parametrize(
    ("every", "share", "steps"), [(0, 1.0, 0), (10, 1.0, 10), (40, 0.125, 5), (3, 0.1, 1)]
)
def test_a_smaller_share_comes_more_often(every, share, steps):
    pace = FixedPace(every, share)
    assert [step for step in range(1, 51) if pace.is_due(step)] == (
        [*range(steps, 51, steps)] if steps else []
    )


@pytest.mark.parametrize(
    ("steps_done", "saved_at", "due"),
    [
        (230, 200, [300, 400]),
        (230, 220, [300, 400]),  # the last one was wanted, not due
        (230, 100, [238, 300, 400]),  # a failure broke off the save of step 200
        (60, 0, [100, 200, 300, 400]),
        (110, 0, [118, 200, 300, 400]),
        (295, 100, [300, 400]),
    ],
)
def test_a_save_that_a_failure_broke_off_is_made_up_for_soon(steps_done, saved_at, due):
    pace = FixedPace(100, steps_done=steps_done, saved_at=saved_at)
    assert [step for step in range(steps_done + 1, 401) if pace.is_due(step)] == due


class Measured:
    """A writer that says what a test wants; a step takes 0.1 s."""

    def __init__(self):
        self.is_saving = False
        self.history = RunHistory(
            world_size=4,
            nodes=4,
            step_s=0.1,
            steps_done=0,
            samples_done=0,
            samples_total=10**6,
            elapsed_s=0.0,
        )

    def cost(self, save_s, blocked_s, **more):
        """All saves so far took so long."""
        self.history = replace(self.history, saves=())
        self.save(save_s, blocked_s, **more)

    def save(self, save_s, blocked_s, kind="base", share=1.0, slowed_s=None):
        """One more."""
        cost = SaveCost(
            step=0,
            kind=kind,
            num_bytes=1,
            blocked_s=blocked_s,
            seconds=save_s,
            share=share,
            slowed_s=slowed_s,
        )
        self.history = self.history.with_save(cost)

    def lose_nodes(self, number, elapsed_s):
        failure = FailureCost(elapsed_s=0.0, kind="partial", lost_share=0.25, nodes_lost=1.0, seconds={})
        self.history = replace(self.history, elapsed_s=elapsed_s, failures=(failure,) * number)


def due(pace, progress, until):
    """Steps at which saves are due."""
    found = []
    while progress.steps_done < until:
        progress.step(8)
        if pace.is_due(progress.steps_done):
            found.append(progress.steps_done)
    return found


@pytest.fixture
def progress():
    return RunProgress()


def make(progress, writer, **options):
    return AutoPace(RULE, Alone(), progress, writer, **{"saved_at": 0, **options})


def test_the_first_save_tells_what_a_save_costs_and_the_next_ones_cost_what_they_may(progress, caplog):
    caplog.set_level("INFO")
    writer = Measured()
    pace = make(progress, writer)
    assert due(pace, progress, FIRST_STEPS) == [FIRST_STEPS]
    writer.cost(save_s=1.0, blocked_s=0.02)  # 20 s or 200 steps between saves cost 0.001 of them
    assert due(pace, progress, 700) == [FIRST_STEPS + 200, FIRST_STEPS + 400, FIRST_STEPS + 600]
    assert caplog.text.count("a save costs 20 ms") == 1  # a change is said, and no other decision
    assert "200 steps from save to save" in caplog.text


def test_nothing_begins_while_a_save_is_under_way(progress):
    writer = Measured()
    writer.cost(save_s=1.0, blocked_s=0.02)
    pace = make(progress, writer)
    assert due(pace, progress, 250) == [200]
    writer.is_saving = True
    assert due(pace, progress, 700) == []
    writer.is_saving = False
    assert len(due(pace, progress, 730)) == 1


def test_small_changes_are_not_followed_and_large_ones_are(progress):
    writer = Measured()
    writer.cost(save_s=1.0, blocked_s=0.02)
    pace = make(progress, writer)
    assert due(pace, progress, 200) == [200]
    writer.cost(save_s=1.0, blocked_s=0.022)
    assert due(pace, progress, 600) == [400, 600]
    writer.cost(save_s=1.0, blocked_s=0.04)
    assert due(pace, progress, 1000) == [1000]


def test_lost_nodes_shorten_the_interval(progress, caplog):
    caplog.set_level("INFO")
    writer = Measured()
    writer.cost(save_s=0.01, blocked_s=1.0)  # 1000 s would be cheap
    pace = make(progress, writer, saved_at=0)
    assert due(pace, progress, 5000) == []
    writer.lose_nodes(30, elapsed_s=500.0)
    progress.pls_total = 0.09
    pace = make(progress, writer)
    steps = due(pace, progress, 10_000)
    assert max(later - earlier for earlier, later in pairwise(steps)) < 5000
    assert "the target PLS of 0.1 asks for it" in caplog.text


def test_with_a_share_of_the_rows_saves_come_so_much_more_often(progress):
    writer = Measured()
    writer.cost(save_s=1.0, blocked_s=0.02)
    assert due(make(progress, writer, share=0.125), progress, 100) == [25, 50, 75, 100]


def test_row_saves_cost_what_they_cost_and_not_what_a_base_does(progress, caplog):
    caplog.set_level("INFO")
    writer = Measured()
    writer.cost(save_s=9.0, blocked_s=2.0)
    writer.save(save_s=0.5, blocked_s=0.01, kind="rows", share=0.125)  # 80 ms until all rows are saved
    assert due(make(progress, writer, share=0.125), progress, 300) == [100, 200, 300]
    assert "a save costs 80 ms, 0.1% of training time" in caplog.text


def test_what_steps_during_a_save_take_longer_is_a_cost_like_any_other(progress):
    writer = Measured()
    writer.cost(save_s=1.0, blocked_s=0.001, slowed_s=0.019)
    assert due(make(progress, writer), progress, 400) == [200, 400]


@pytest.mark.parametrize("kind", ["base", "rows"])
def test_storage_that_becomes_slow_is_followed_within_a_few_saves(progress, kind):
    writer = Measured()
    for _ in range(SAVES_KEPT):
        writer.save(save_s=1.0, blocked_s=0.001, kind=kind)
    pace = make(progress, writer)
    fast = due(pace, progress, 300)
    assert max(later - earlier for earlier, later in pairwise(fast)) == 15
    slow = 0
    while pace._interval_s < 40.0:
        slow += 1
        writer.save(save_s=40.0, blocked_s=0.001, kind=kind)
        due(pace, progress, progress.steps_done + 30)
    assert slow == SAVES_FOLLOWED // 2 + 1


def test_after_a_restart_the_clock_of_the_last_save_continues(progress):
    for _ in range(290):
        progress.step(8)
    writer = Measured()
    writer.cost(save_s=1.0, blocked_s=0.02)
    pace = make(progress, writer, saved_at=100)
    assert due(pace, progress, 310) == [300]
