"""Which save comes next, which moments count as a whole table, and what a failure makes of both."""

import pytest

from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import FixedPace
from cpr.saving.periodic import Saves
from cpr.saving.row_saves import RowSaves
from tests.cpr.saving.fakes import FakeCheckpointer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """A save that has failed is tried again after the next step."""
    monkeypatch.setattr("cpr.saving.periodic.FIRST_PAUSE_S", 0.0)


class FakePrioritizer:
    """Notes what it is told, and takes nothing that does not make sense."""

    def __init__(self):
        self.under_way, self.said = None, []

    def rows_to_save(self):
        assert self.under_way is None
        self.under_way = "rows"
        return {}

    def begin_full_save(self):
        assert self.under_way is None
        self.under_way = "base"

    def confirm(self):
        assert self.under_way
        self.said.append(("confirmed", self.under_way))
        self.under_way = None

    def take_back(self):
        assert self.under_way
        self.said.append(("taken back", self.under_way))
        self.under_way = None


class Run:
    """Saves due after every step, each with a quarter of the rows."""

    def __init__(self, needs_base=True, **options):
        self.progress = RunProgress()
        self.checkpointer = FakeCheckpointer(self.progress, 2, by_step=True, **options)
        self.checkpointer.has_base = not needs_base
        self.prioritizer = FakePrioritizer()
        self.rows = RowSaves(
            self.checkpointer, self.progress, self.prioritizer, share=0.25, needs_base=needs_base
        )
        self.saves = Saves(self.checkpointer, self.progress, FixedPace(4, 0.25), "rolling", self.rows)

    def train(self, steps):
        for _ in range(steps):
            self.progress.step(10)
            self.saves.step()
            self.saves.save_if_due()
        return self


def test_a_base_comes_first_and_every_fourth_quarter_counts_as_a_table():
    run = Run().train(10)
    assert run.checkpointer.log == [("base", 1), *(("rows", step) for step in range(2, 11))]
    assert run.progress.saves == {1: 10, 5: 50, 9: 90}
    # a loss of rows that come from the save of step 8 has cost what was trained since step 5
    assert run.progress.samples_at(8) == 50


def test_where_a_base_fits_rows_continue_and_the_count_starts_over():
    run = Run(needs_base=False).train(4)
    assert [kind for kind, _ in run.checkpointer.log] == ["rows"] * 4
    assert run.progress.saves == {4: 40}


def test_a_failed_row_save_is_taken_back_and_its_moment_does_not_count():
    run = Run(failing={5}).train(9)
    assert run.prioritizer.said == [
        ("confirmed", "base"),
        *[("confirmed", "rows")] * 3,
        ("taken back", "rows"),
        ("confirmed", "rows"),
    ]
    assert run.progress.saves == {1: 10, 7: 70}  # the one after makes it good


def test_after_a_failed_base_comes_another():
    run = Run(failing={1, 3}).train(9)
    assert [kind for kind, _ in run.checkpointer.log] == ["base", "base", "base", "rows", "rows"]
    assert run.progress.saves == {6: 60}


def test_after_a_chain_turned_out_to_be_damaged_comes_a_base():
    run = Run(breaking={3}).train(5)
    assert [kind for kind, _ in run.checkpointer.log] == ["base", "rows", "rows", "base", "rows"]


def test_a_save_that_was_skipped_holds_nothing():
    run = Run(skipping={1, 3, 6}).train(8)
    assert run.checkpointer.log[:3] == [("base", 2), ("rows", 4), ("rows", 5)]
    assert ("taken back", "rows") in run.prioritizer.said
    assert run.progress.saves == {2: 20, 8: 80}


def test_a_row_save_waits_for_no_other_and_comes_as_soon_as_that_is_over():
    class Rarely:
        def is_due(self, steps_done):
            return steps_done in {1, 5, 40}

    run = Run(busy=range(5, 20))
    run.saves = Saves(run.checkpointer, run.progress, Rarely(), "rolling", run.rows)
    run.train(45)
    assert run.checkpointer.log == [("base", 1), ("rows", 21), ("rows", 40)]
