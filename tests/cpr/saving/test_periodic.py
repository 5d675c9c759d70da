"""When saves are made, and what becomes of those that fail."""

from unittest.mock import Mock

import pytest

from cpr.errors import SaveFailedError
from cpr.estimator.history import SaveEvent
from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import FixedPace
from cpr.saving.history_writer import HistoryWriter
from cpr.saving.periodic import Saves
from tests.cpr.saving.fakes import FakeCheckpointer


@pytest.fixture
def no_pauses(monkeypatch):
    """A save that has failed is tried again after the next step."""
    monkeypatch.setattr("cpr.saving.periodic.FIRST_PAUSE_S", 0.0)


def events(saves):
    return [each for each in saves.take_costs() if isinstance(each, SaveEvent)]


def train(progress, saves, steps):
    for _ in range(steps):
        progress.step(1)
        saves.step()
        saves.save_if_due()


def test_training_continues_however_many_saves_fail_and_they_are_tried_again(no_pauses, caplog):
    progress = RunProgress()
    storage = FakeCheckpointer(progress, unable=range(2, 50), failing=range(50, 55))
    saves = Saves(storage, progress, FixedPace(10), "rolling")
    train(progress, saves, 600)
    assert storage.newest_step >= 560, "they never succeeded again"
    told = [record.message for record in caplog.records]
    assert len(told) == len(set(told)) == 53
    assert "save 2. Training continues; the save is tried again after step" in told[0]


def test_a_save_that_fails_is_tried_again_before_the_next_one_is_due(no_pauses):
    progress = RunProgress()
    storage = FakeCheckpointer(progress, unable={2})
    train(progress, Saves(storage, progress, FixedPace(100), "rolling"), 299)
    storage.wait()
    assert storage.asked == 3
    assert sorted(progress.saves) == [100, 201]


def test_the_last_save_is_asked_for_until_it_is_not_skipped():
    progress = RunProgress()
    storage = FakeCheckpointer(progress, skipping={2, 3})
    saves = Saves(storage, progress, FixedPace(5), "rolling")
    train(progress, saves, 6)
    saves.finish()
    assert storage.newest_step == 6


def test_the_last_save_is_tried_again_until_it_succeeds(monkeypatch, caplog):
    slept = []
    monkeypatch.setattr("cpr.saving.periodic.time.sleep", slept.append)
    progress = RunProgress()
    storage = FakeCheckpointer(progress, unable={2}, failing={1, 3})
    saves = Saves(storage, progress, FixedPace(0), "rolling")
    train(progress, saves, 6)
    saves.finish(lambda: slept.append("kept"))
    assert storage.newest_step == 6
    assert slept == ["kept", 10.0, "kept", 20.0, "kept", 40.0]
    assert [record.message.partition("; ")[0] for record in caplog.records] == [
        f"save {number}. Training is over" for number in (1, 2, 3)
    ]


def test_the_last_save_is_given_up_after_the_limit():
    progress = RunProgress()
    storage = FakeCheckpointer(progress, failing=range(1, 10))
    saves = Saves(storage, progress, FixedPace(0), "rolling", give_up_after_s=1e-9)
    train(progress, saves, 6)
    with pytest.raises(SaveFailedError, match=r"save 2\. Saves have failed for"):
        saves.finish()
    assert storage.asked == 2


def test_a_save_that_is_wanted_now_is_noted_as_all_others_are_and_made_once():
    progress = RunProgress()
    storage = FakeCheckpointer(progress)
    saves = Saves(storage, progress, FixedPace(5), "rolling")
    train(progress, saves, 7)
    assert saves.now(1.0)
    assert (storage.newest_step, max(progress.saves), storage.asked) == (7, 7, 2)
    assert saves.now(1.0)
    assert storage.asked == 2


def test_a_save_that_is_wanted_now_is_made_though_others_before_it_have_failed(caplog):
    class Repaired(FakeCheckpointer):
        """Whose failure is told to whoever waits for it, once."""

        error = None

        def wait_until_idle(self, deadline=None):
            error, self.error = self.error, None
            if error:
                raise error
            return self.wait()

    progress = RunProgress()
    storage = Repaired(progress)
    saves = Saves(storage, progress, FixedPace(0), "rolling")
    for _ in range(4):
        train(progress, saves, 1)
        storage.error = SaveFailedError("the disk was full")
        assert saves.now(1.0)
        assert storage.newest_step == max(progress.saves) == progress.steps_done
    assert "the disk was full" in caplog.text


@pytest.mark.parametrize("every", [0, 7])
def test_the_end_is_saved_though_a_save_that_was_wanted_at_the_same_step_has_failed(every):
    progress = RunProgress()
    storage = FakeCheckpointer(progress, failing={1})
    saves = Saves(storage, progress, FixedPace(every), "rolling")
    train(progress, saves, 7)
    with pytest.raises(SaveFailedError, match="save 1"):
        saves.now(None)
    saves.finish()
    assert (storage.newest_step, storage.asked) == (7, 2)


def test_a_save_that_is_wanted_again_after_it_has_failed_is_made_again():
    progress = RunProgress()
    storage = FakeCheckpointer(progress, failing={1, 2})
    saves = Saves(storage, progress, FixedPace(0), "rolling")
    train(progress, saves, 7)
    for number in (1, 2):
        with pytest.raises(SaveFailedError, match=f"save {number}"):
            saves.now(None)
    assert saves.now(None)
    assert storage.newest_step == 7


def test_saves_that_were_skipped_or_failed_to_begin_do_not_shorten_what_is_told_of_the_interval():
    progress = RunProgress()
    storage = FakeCheckpointer(progress, skipping={2, 4}, unable={6})
    train(progress, Saves(storage, progress, FixedPace(10), "rolling"), 70)
    assert sorted(progress.saves) == [10, 30, 50]
    assert progress.samples_between_saves == 20


def test_what_saves_took_and_why_they_failed_is_told_once(no_pauses):
    progress = RunProgress()
    storage = FakeCheckpointer(progress, failing={2})
    saves = Saves(storage, progress, FixedPace(100), "rolling")
    train(progress, saves, 150)
    begun, first = saves.take_costs()
    assert begun == SaveEvent(step=100)
    assert (first.step, first.kind, first.num_bytes, first.blocked_s) == (100, "base", 100, 0.5)
    assert saves.take_costs() == []
    train(progress, saves, 130)
    begun, failed, again, cost = saves.take_costs()
    assert (begun.step, failed.failure, again, cost.step) == (200, "save 2", SaveEvent(step=233), 233)


def test_failed_saves_are_counted_in_the_history(no_pauses, monkeypatch):
    monkeypatch.setattr("cpr.saving.periodic.time.sleep", lambda _: None)
    progress, writer = RunProgress(), Mock(spec=HistoryWriter)
    storage = FakeCheckpointer(progress, unable={1, 3}, failing={2})
    saves = Saves(storage, progress, FixedPace(10), "rolling", writer=writer)
    train(progress, saves, 15)
    saves.finish()
    assert [name for name, *_ in writer.mock_calls if name != "step"][-2:] == ["note_failed_save", "finish"]
    assert writer.note_failed_save.call_count == sum(bool(event.failure) for event in events(saves)) == 3


@pytest.mark.parametrize(("saved", "trained", "num_saves"), [(6, 0, 0), (6, 1, 1), (5, 0, 1), (None, 0, 1)])
def test_the_end_is_not_saved_again(saved, trained, num_saves):
    progress = RunProgress()
    progress.steps_done = 6
    storage = FakeCheckpointer(progress)
    storage.saved_moment = saved
    saves = Saves(storage, progress, FixedPace(0), "rolling")
    train(progress, saves, trained)
    saves.finish()
    assert storage.asked == num_saves
