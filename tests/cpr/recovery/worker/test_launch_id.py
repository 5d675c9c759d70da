"""What launched a worker."""

import os

from cpr.recovery.worker.memory import launch_of_this_worker


def test_a_launch_is_known_by_cpr_run_or_else_by_the_agent_and_never_by_an_id_that_people_choose(monkeypatch):
    monkeypatch.delenv("CPR_LAUNCH", raising=False)
    of_parent = launch_of_this_worker()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    assert launch_of_this_worker() == of_parent
    monkeypatch.setenv("CPR_AGENT_PID", str(os.getpid()))
    assert launch_of_this_worker() not in {of_parent, ""}
    monkeypatch.setenv("CPR_LAUNCH", "of cpr run")
    assert launch_of_this_worker() == "of cpr run"
