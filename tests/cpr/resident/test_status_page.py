"""A worker's status page survives it, and damage is noticed."""

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
    status = StatusPage(path)
    status.step_finished = 5
    status.leave("told to stop")
    status.begin(generation=4)
    assert (status.pid, status.start_ticks) == (os.getpid(), Process.this().start_ticks)
    assert (status.left_ns, status.reason, status.generation, status.step_finished) == (NOTHING, "", 4, 5)


def test_an_end_for_good_is_never_forgotten_and_keeps_its_reason(path):
    status = StatusPage(path)
    status.leave("told to stop")
    assert not status.has_stopped
    status.begin(generation=1)
    status.leave("the loss is nan", for_good=True)
    status.begin(generation=2)
    status.leave("no use in going on")
    status.begin(generation=3)
    assert (status.has_stopped, status.stopped_in, status.reason) == (True, 1, "the loss is nan")
    assert status.left_ns == NOTHING


def test_a_long_reason_is_cut_at_a_character(path):
    status = StatusPage(path)
    status.reason = "x" + "é" * REASON_BYTES
    assert status.reason == "x" + "é" * ((REASON_BYTES - 1) // 2)


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
    StatusPage(path)
    os.truncate(path, PAGE_BYTES - 1)
    with pytest.raises(DamagedMemoryError, match=f"{PAGE_BYTES - 1} bytes"):
        StatusPage(path)
