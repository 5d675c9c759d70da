"""A worker's last word survives it, and damage is noticed."""

import os
import time

import pytest

from cpr.errors import DamagedMemoryError
from cpr.processes import Process
from cpr.resident.status_page import MAGIC, NOTHING, PAGE_BYTES, REASON_BYTES, WORDS, StatusPage


@pytest.fixture
def path(tmp_path):
    return tmp_path / "marks"


def test_what_one_says_another_reads_at_once(path):
    mine, others = StatusPage(path), StatusPage(path)
    assert (others.step_finished, others.update_begun, others.slot, others.reason) == (
        0,
        NOTHING,
        NOTHING,
        "",
    )
    mine.step_finished = 2**40
    mine.update_begun = 7
    mine.leave("RuntimeError: out of ideas")
    assert (others.step_finished, others.update_begun) == (2**40, 7)
    assert others.reason == "RuntimeError: out of ideas"
    assert 0 <= time.time_ns() - others.left_ns < 60e9


def test_a_new_owner_forgets_the_end_of_the_last_one_but_not_its_steps(path):
    marks = StatusPage(path)
    marks.step_finished = 5
    marks.leave("told to stop")
    marks.begin(generation=4)
    assert (marks.pid, marks.start_ticks) == (os.getpid(), Process.this().start_ticks)
    assert (marks.left_ns, marks.reason, marks.generation, marks.step_finished) == (NOTHING, "", 4, 5)


def test_that_values_are_no_numbers_is_never_forgotten_and_keeps_its_reason(path):
    marks = StatusPage(path)
    marks.leave("told to stop")
    assert not marks.diverged
    marks.begin(generation=1)
    marks.leave("the loss is nan", diverged=True)
    marks.begin(generation=2)
    marks.leave("no use in going on")
    marks.begin(generation=3)
    assert (marks.diverged, marks.diverged_in, marks.reason) == (True, 1, "the loss is nan")
    assert marks.left_ns == NOTHING


def test_a_long_reason_is_cut_at_a_character(path):
    marks = StatusPage(path)
    marks.reason = "x" + "é" * REASON_BYTES
    assert marks.reason == "x" + "é" * ((REASON_BYTES - 1) // 2)


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("magic", MAGIC + 1, "begins with"),
        ("reason_bytes", REASON_BYTES + 1, "impossible length"),
    ],
)
def test_damage_is_refused(path, word, value, said):
    StatusPage(path)._words[WORDS.index(word)] = value
    with pytest.raises(DamagedMemoryError, match=said):
        StatusPage(path)


def test_another_size_is_refused(path):
    StatusPage(path).close()
    os.truncate(path, PAGE_BYTES - 1)
    with pytest.raises(DamagedMemoryError, match=f"{PAGE_BYTES - 1} bytes"):
        StatusPage(path)
