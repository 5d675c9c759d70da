"""When saves are made, and how many may fail."""

import pytest

from cpr.checkpoint.ranks import Alone
from cpr.errors import SaveFailedError
from cpr.recovery.course import Course
from cpr.recovery.pace import FixedPace
from cpr.recovery.saving import FAILED_SAVES_IN_A_ROW, Saves


class SlowStorage:
    """A checkpointer whose saves become the newest one only when the next is due."""

    def __init__(self, course, failing=(), skipped=()):
        self.course, self.failing, self.skipped = course, failing, skipped
        self.newest_step, self.under_way, self.asked = None, None, 0
        self.agreement = Alone()

    def step(self):
        pass

    def wait(self, timeout_s=None):
        self.newest_step, self.under_way = self.under_way or self.newest_step, None
        return True

    def save(self, moment, timeout_s=None):
        self.wait()
        self.asked += 1
        if self.asked in self.failing:
            raise SaveFailedError(f"save {self.asked}")
        if self.asked in self.skipped:
            return None
        self.under_way = self.course.steps_done
        return self

    def wait_until_idle(self, deadline=None):
        return self.wait()

    def finish(self, samples):
        self.finished_at = samples

    def is_free(self):
        return True

    def close(self):
        self.wait()


def train(course, saves, steps):
    for _ in range(steps):
        course.step(1)
        saves.step()
        saves.save_if_due()


def test_saves_that_fail_now_and_then_do_not_add_up_though_each_takes_longer_than_the_interval():
    course = Course()
    storage = SlowStorage(course, failing={2, 20, 40, 60})
    train(course, Saves(storage, course, FixedPace(1), "rolling"), 80)
    assert storage.newest_step == 79


def test_the_third_save_in_a_row_that_fails_ends_training():
    course = Course()
    saves = Saves(SlowStorage(course, failing={5, 6, 7}), course, FixedPace(1), "rolling")
    train(course, saves, 6)
    with pytest.raises(SaveFailedError, match="save 7"):
        train(course, saves, 1)


def test_the_last_save_is_asked_for_until_it_is_not_skipped():
    course = Course()
    storage = SlowStorage(course, skipped={2, 3})
    saves = Saves(storage, course, FixedPace(5), "rolling")
    train(course, saves, 6)
    saves.finish()
    assert storage.newest_step == 6


def test_a_save_that_is_wanted_now_is_noted_as_all_others_are_and_made_once():
    course = Course()
    storage = SlowStorage(course)
    saves = Saves(storage, course, FixedPace(5), "rolling")
    train(course, saves, 7)
    assert saves.now(1.0)
    assert (storage.newest_step, max(course.saves), storage.asked) == (7, 7, 2)
    assert saves.now(1.0)
    assert storage.asked == 2


def test_a_save_that_is_wanted_now_and_skipped_is_none():
    course = Course()
    saves = Saves(SlowStorage(course, skipped={2}), course, FixedPace(5), "rolling")
    train(course, saves, 7)
    assert not saves.now(1.0)


def test_a_save_that_is_wanted_now_is_made_though_others_before_it_have_failed(caplog):
    class Repaired(SlowStorage):
        """Whose failure is told to whoever waits for it, once."""

        error = None

        def wait_until_idle(self, deadline=None):
            error, self.error = self.error, None
            if error:
                raise error
            return self.wait()

    course = Course()
    storage = Repaired(course)
    saves = Saves(storage, course, FixedPace(0), "rolling")
    for _ in range(FAILED_SAVES_IN_A_ROW):
        train(course, saves, 1)
        storage.error = SaveFailedError("the disk was full")
        assert saves.now(1.0)
        assert storage.newest_step == max(course.saves) == course.steps_done
    assert "the disk was full" in caplog.text


class FailingStorage(SlowStorage):
    """Whose saves fail in the background, which whoever waits is told once."""

    def __init__(self, course, broken=()):
        super().__init__(course)
        self.broken = set(broken)

    def wait(self, timeout_s=None):
        if self.under_way is not None and self.asked in self.broken:
            self.under_way = None
            raise SaveFailedError(f"save {self.asked}")
        return super().wait(timeout_s)


@pytest.mark.parametrize("every", [0, 7])
def test_the_end_is_saved_though_a_save_that_was_wanted_at_the_same_step_has_failed(every):
    course = Course()
    storage = FailingStorage(course, broken={1})
    saves = Saves(storage, course, FixedPace(every), "rolling")
    train(course, saves, 7)
    with pytest.raises(SaveFailedError, match="save 1"):
        saves.now(None)
    saves.finish()
    assert (storage.newest_step, storage.asked) == (7, 2)


def test_a_save_that_is_wanted_again_after_it_has_failed_is_made_again():
    course = Course()
    storage = FailingStorage(course, broken={1, 2})
    saves = Saves(storage, course, FixedPace(0), "rolling")
    train(course, saves, 7)
    for number in (1, 2):
        with pytest.raises(SaveFailedError, match=f"save {number}"):
            saves.now(None)
    assert saves.now(None)
    assert storage.newest_step == 7


def test_a_last_save_that_has_failed_is_not_taken_for_a_good_one_when_it_is_wanted_again():
    course = Course()
    storage = FailingStorage(course, broken={1, 2})
    saves = Saves(storage, course, FixedPace(0), "rolling")
    train(course, saves, 7)
    for number in (1, 2):
        with pytest.raises(SaveFailedError, match=f"save {number}"):
            saves.finish()


def test_saves_that_were_skipped_or_failed_to_begin_do_not_shorten_what_is_told_of_the_interval():
    course = Course()
    storage = SlowStorage(course, skipped={2, 4}, failing={6})
    train(course, Saves(storage, course, FixedPace(10), "rolling"), 70)
    assert sorted(course.saves) == [10, 30, 50, 70]
    assert course.samples_between_saves == 20
