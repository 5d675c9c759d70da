"""Whose saves a directory holds."""

import os

import pytest

from cpr.checkpoint.ranks import Alone
from cpr.checkpoint.storage import open_storage
from cpr.recovery.launches import LAUNCHES_PATH, is_of_launches, launch_of_this_worker, note_launches


def test_a_launch_is_known_by_cpr_run_or_else_by_the_agent_and_never_by_an_id_that_people_choose(monkeypatch):
    monkeypatch.delenv("CPR_LAUNCH", raising=False)
    of_parent = launch_of_this_worker()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    assert launch_of_this_worker() == of_parent
    monkeypatch.setenv("CPR_AGENT_PID", str(os.getpid()))
    assert launch_of_this_worker() not in {of_parent, ""}
    monkeypatch.setenv("CPR_LAUNCH", "of cpr run")
    assert launch_of_this_worker() == "of cpr run"


def test_one_launch_that_is_still_there_is_enough(tmp_path):
    storage, group = open_storage(str(tmp_path)), Alone()
    assert not is_of_launches(storage, group, {"a"})
    note_launches(storage, group, {"a", "b"})
    assert is_of_launches(storage, group, {"b", "c"})
    assert not is_of_launches(storage, group, {"c"})
    assert not is_of_launches(storage, group, set())
    note_launches(storage, group, {"b", "c"})
    assert not is_of_launches(storage, group, {"a"})


@pytest.mark.parametrize("content", ["", "{}", "[1"])
def test_what_nobody_can_read_is_nobodys(tmp_path, content):
    (tmp_path / LAUNCHES_PATH).write_text(content)
    assert not is_of_launches(open_storage(str(tmp_path)), Alone(), {"a"})
