"""When a save that has failed is tried again: alike on all ranks, later and later."""

from itertools import pairwise

import pytest

from cpr.checkpoint.collectives import Alone
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import SaveFailedError
from cpr.saving import periodic as module
from cpr.saving.periodic import FIRST_PAUSE_S, LONGEST_PAUSE_S, Retries
from tests.cpr.checkpoint.world import run_ranks

STEP_S = 0.5


@pytest.fixture
def clock(monkeypatch):
    """The time by `time.monotonic`, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def fail_all(retries, clock, num_steps):
    """Every save fails in the background; steps after which one was tried again."""
    tried = []
    for step in range(1, num_steps + 1):
        clock[0] += STEP_S
        retries.look(step)
        if step == 1 or retries.is_due(step):
            tried.append(step)
            save = Save("base", "rolling", "exact")
            retries.begin(save, step)
            save.finish(SaveFailedError("the disk is full"))
    return tried


def test_pauses_grow_up_to_a_limit(clock, caplog):
    tried = fail_all(Retries(Alone()), clock, 20_000)
    pauses = [(after - before) * STEP_S for before, after in pairwise(tried)]
    look_s = module.FIRST_LOOK_STEPS * STEP_S
    wanted = [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) + look_s for n in range(len(pauses))]
    assert pauses == pytest.approx(wanted)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S + look_s)
    assert len(caplog.records) == len(tried), "each failure is told once"


def test_a_limit_by_time_ends_it_and_a_last_try_comes_just_before(clock):
    retries = Retries(Alone(), give_up_after_s=3000.0)
    began = clock[0]
    with pytest.raises(SaveFailedError, match=r"disk is full\. Saves have failed for 50.* min"):
        fail_all(retries, clock, 20_000)
    assert 3000 <= clock[0] - began <= 3000 + 100 * STEP_S


def test_a_save_that_was_given_up_is_no_failure(clock):
    retries = Retries(Alone())
    save = Save("base", "consistent", "exact")
    retries.begin(save, 1)
    save.is_excused = True
    save.finish(SaveFailedError("it took too long"))
    assert retries.look(100) is None
    assert not retries.is_failing


def test_ranks_that_hear_of_a_failure_after_different_steps_try_again_after_the_same_one(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 1e-4)

    def work(group):
        due, retries = [], Retries(group)
        save = Save("base", "rolling", "exact")
        retries.begin(save, 10)
        for step in range(11, 4000):
            if step == (17, 25)[group.rank]:
                save.finish(SaveFailedError("the disk is full"))
            retries.look(step)
            if retries.is_due(step):
                due.append(step)
                save = Save("base", "rolling", "exact")
                retries.begin(save, step)
                save.commit("committed", 0.0)
        return due

    first, second = run_ranks(work)
    assert first == second
    assert len(first) == 1
