"""How far a run is: what is counted, what comes back, and when it is given up."""

import json

import pytest

from cpr.recovery.run.progress import SAVES_KEPT, Charge, RunProgress
from cpr.recovery.run.report import Recovery

MAX_WITHOUT_PROGRESS = 2


def handed_on(progress):
    """The same course in the next generation."""
    other = RunProgress()
    text = json.dumps(progress.state_dict(), default=bytes.decode)
    other.take_over(json.loads(text, object_pairs_hook=_with_numbers))
    return other


def _with_numbers(pairs):
    return {int(key) if key.isdigit() else key: value for key, value in pairs}


def test_a_batch_that_was_skipped_counts_as_done_with_the_next_step():
    progress = RunProgress()
    progress.step(8)
    progress.begin(1, (), True, MAX_WITHOUT_PROGRESS)
    assert (progress.steps_done, progress.batches_done, progress.to_skip) == (1, 1, 1)
    progress = handed_on(progress)
    progress.begin(2, (), True, MAX_WITHOUT_PROGRESS)
    assert progress.to_skip == 2
    progress.step(8)
    done = (progress.steps_done, progress.samples_done, progress.batches_done, progress.to_skip)
    assert done == (2, 16, 4, 0)
    with pytest.raises(ValueError, match="batches_to_skip"):
        progress.note_skipped()


def test_samples_at_a_save():
    progress = RunProgress()
    for number in range(100):
        progress.step(10)
        if number % 2:
            progress.note_save()
    assert max(progress.saves) == 100
    assert len(progress.saves) == SAVES_KEPT
    assert progress.samples_at(98) == 980
    assert progress.samples_at(99) == 980  # of an unknown save: rather too few than too many


def test_row_saves_are_counted_from_the_newest_moment_that_counts_and_on_through_generations():
    progress = RunProgress()
    for step in range(1, 10):
        progress.step(10)
        if step in {2, 6}:
            progress.note_save()
        if step != 2:
            progress.note_row_save()
    assert (progress.row_saves_since, set(progress.saves)) == (3, {2, 6})
    assert progress.row_saves == [*range(3, 10)]  # no further back than needed if the newest failed
    assert handed_on(progress).row_saves_since == 3
    progress.forget_save(8)
    assert progress.row_saves_since == 2
    progress.forget_save(6)
    assert progress.row_saves_since == 5


def test_saves_that_were_never_committed_count_for_nothing():
    progress = RunProgress()
    for step in range(1, 7):
        progress.step(10)
        progress.note_row_save()
        if step in {1, 5}:
            progress.note_save()
    progress.forget_saves_after(4)
    assert (set(progress.saves), progress.row_saves_since) == ({1}, 3)
    assert progress.samples_at(6) == 10
    progress.forget_saves_after(0)
    assert (progress.saves, progress.row_saves) == ({}, [])


def test_a_save_older_than_all_that_are_known_of_has_its_share_of_the_samples():
    progress = RunProgress()
    assert progress.samples_at(0) == 0
    for _ in range(40):
        progress.step(10)
        progress.note_save()
    assert min(progress.saves) == 9
    assert progress.samples_at(3) == 30
    progress.saves.clear()  # all that is known of is now
    assert progress.samples_at(20) == 200


def test_what_a_checkpoint_brings_back_forgets_no_recovery_and_no_vain_attempt():
    saved = RunProgress()
    saved.step(8)
    state = saved.state_dict()
    progress = handed_on(saved)
    progress.recoveries = [Recovery(kind="start", reason="", generation=0, step=0)]
    progress.generation, progress.progress_generation = 4, 2
    progress.step(8)
    progress.load_state_dict(state)
    assert (progress.steps_done, len(progress.recoveries), progress.generation) == (1, 1, 4)
    progress.start_over()
    assert (progress.steps_done, progress.samples_done, len(progress.recoveries)) == (0, 0, 1)


def test_what_was_charged_is_handed_on_with_the_newest_world_sizes():
    progress = RunProgress()
    progress.add_pls(0.25, [Charge(4, 1, 1.0, 0, 10), Charge(4, 2, 1.0, 0, 10)])
    progress.add_pls(0.25, [Charge(4, 1, 1.0, 5, 20), Charge(3, 0, 0.5, 5, 20)])
    expected = {Charge(4, 1, 1.0, 5, 20), Charge(4, 2, 1.0, 0, 10), Charge(3, 0, 0.5, 5, 20)}
    assert set(handed_on(progress).charges) == expected
    progress.add_pls(0.25, [Charge(3, 1, 1.0, 20, 30)])
    assert set(progress.charges) == {Charge(3, 0, 0.5, 5, 20), Charge(3, 1, 1.0, 20, 30)}
    progress.start_over()
    assert progress.charges == ()


def test_an_unknown_pls_stays_unknown():
    progress = RunProgress()
    progress.add_pls(0.25)
    progress.add_pls(0.25)
    assert progress.pls_total == 0.5
    progress.add_pls(None)
    progress.add_pls(0.25)
    assert progress.pls_total is None


def story_of(number):
    return Recovery(kind="process", reason="rank 3 was killed", generation=number, step=7 * number)


def test_reports_of_recoveries_are_handed_on_as_bytes_that_a_step_leaves_alone():
    """The replica copies an object of bytes only when it is another one: a step costs no more after many."""
    progress = RunProgress()
    progress.recoveries = [story_of(1), story_of(2)]
    before = progress.state_dict()["recoveries"]
    progress.step(samples=8)
    assert progress.state_dict()["recoveries"] is before
    assert isinstance(before, bytes)
    assert handed_on(progress).recoveries == progress.recoveries


def test_a_story_that_was_stored_as_text_is_still_read():
    """As in checkpoints and memory of programs before."""
    progress = RunProgress()
    progress.recoveries = [story_of(1), story_of(2)]
    state = progress.state_dict()
    again = RunProgress()
    again.take_over({**state, "recoveries": state["recoveries"].decode()})
    assert again.recoveries == progress.recoveries
    assert again.state_dict() == state
