"""Workers that start from a prepared process behave as if they had started by themselves."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.cpr.forkserver.processes import DEADLINE_S, prepared_for, said_by, wait_for_end, wait_for_name

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_restarted_worker_is_a_fork_with_its_own_circumstances(prepared, start, agent, tmp_path):
    worker = start("code", 7, rank=1)
    said, _ = worker.communicate(timeout=DEADLINE_S)
    seen = json.loads(said)
    assert seen["parent"] == prepared.pid
    assert not seen["prepared_here"]
    assert seen["pid"] not in {worker.pid, prepared.pid}
    assert (seen["arguments"], seen["rank"], seen["folder"]) == (["code", "7"], "1", str(tmp_path))
    assert worker.returncode == 7


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_a_fork_runs_where_its_borrower_was_bound_to(start, agent):
    """As `torchrun --numa-binding` has it: rank 0, which left the prepared process behind, has its own."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    here = start("code", 0, preexec_fn=lambda: os.sched_setaffinity(0, [first]))
    assert said_by(here)["processors"] == [first]
    here.communicate(timeout=DEADLINE_S)
    bound = start("code", 0, rank=1, preexec_fn=lambda: os.sched_setaffinity(0, [last]))
    seen = said_by(bound)
    assert not seen["prepared_here"]
    assert seen["processors"] == [last]


def test_several_at_once(prepared, start):
    workers = [start("code", rank, rank=rank) for rank in range(4)]
    pids = {json.loads(worker.communicate(timeout=DEADLINE_S)[0])["pid"] for worker in workers}
    assert len(pids) == 4
    assert [worker.returncode for worker in workers] == [0, 1, 2, 3]


def test_an_exception_is_told_where_the_worker_was_started(prepared, start):
    worker = start("raise")
    _, told = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 1
    assert "ValueError: what went wrong" in told


def test_a_killed_fork_is_a_killed_worker(prepared, start):
    worker = start("kill")
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == -signal.SIGKILL


def test_signals_are_passed_on(prepared, start):
    worker = start("wait")
    said_by(worker)
    assert worker.stdout.readline() == "waiting\n"
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 5


def test_killing_what_torchrun_started_kills_the_fork(prepared, start):
    worker = start("wait")
    fork = psutil.Process(said_by(worker)["pid"])
    wait_for_name(worker, f"cpr-for-{fork.pid}")
    assert (prepared.name(), fork.name()) == ("cpr-standby", "cpr-worker")
    worker.kill()
    wait_for_end(fork)
    assert prepared.is_running()


def test_workers_end_with_the_prepared_process_and_the_next_prepares_itself(prepared, start):
    worker = start("wait")
    fork = psutil.Process(said_by(worker)["pid"])
    prepared.kill()
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == -signal.SIGKILL
    wait_for_end(fork)
    said, _ = start("code", 0).communicate(timeout=DEADLINE_S)
    assert json.loads(said)["prepared_here"]


def test_it_ends_with_the_agent_but_not_before_its_forks(prepared, start, agent):
    worker = start("wait")
    fork = psutil.Process(said_by(worker)["pid"])
    agent.kill()
    agent.communicate()
    time.sleep(0.1)
    assert fork.is_running()
    worker.kill()
    wait_for_end(fork)
    wait_for_end(prepared)


def test_where_nobody_restarts_nothing_is_left_behind(start, agent):
    said, _ = start("code", 0, restarts=0).communicate(timeout=DEADLINE_S)
    assert json.loads(said)["prepared_here"]
    assert not prepared_for(agent)
