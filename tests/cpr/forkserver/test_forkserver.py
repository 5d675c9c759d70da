"""Forks of the fork server behave like workers that started by themselves."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.cpr.forkserver.processes import DEADLINE_S, report_of, servers_of, wait_for_end, wait_for_name

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_restarted_worker_is_a_fork_with_its_own_properties(server, start, agent, tmp_path):
    worker = start("code", 7, rank=1)
    output, _ = worker.communicate(timeout=DEADLINE_S)
    seen = json.loads(output)
    assert seen["parent"] == server.pid
    assert not seen["prepared_here"]
    assert seen["pid"] not in {worker.pid, server.pid}
    assert (seen["arguments"], seen["rank"], seen["folder"]) == (["code", "7"], "1", str(tmp_path))
    assert worker.returncode == 7


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_fork_runs_on_the_processors_of_its_proxy(start, agent):
    """As under `torchrun --numa-binding`: rank 0, which left the fork server behind, has others."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    here = start("code", 0, preexec_fn=lambda: os.sched_setaffinity(0, [first]))
    assert report_of(here)["processors"] == [first]
    here.communicate(timeout=DEADLINE_S)
    bound = start("code", 0, rank=1, preexec_fn=lambda: os.sched_setaffinity(0, [last]))
    seen = report_of(bound)
    assert not seen["prepared_here"]
    assert seen["processors"] == [last]


def test_several_forks_at_once(server, start):
    workers = [start("code", rank, rank=rank) for rank in range(4)]
    pids = {json.loads(worker.communicate(timeout=DEADLINE_S)[0])["pid"] for worker in workers}
    assert len(pids) == 4
    assert [worker.returncode for worker in workers] == [0, 1, 2, 3]


def test_exception_is_printed_on_the_streams_of_the_proxy(server, start):
    worker = start("raise")
    _, errors = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 1
    assert "ValueError: what went wrong" in errors


def test_killed_fork_kills_the_proxy(server, start):
    worker = start("kill")
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == -signal.SIGKILL


def test_signals_are_forwarded(server, start):
    worker = start("wait")
    report_of(worker)
    assert worker.stdout.readline() == "waiting\n"
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 5


def test_killing_the_proxy_kills_the_fork(server, start):
    worker = start("wait")
    fork = psutil.Process(report_of(worker)["pid"])
    wait_for_name(worker, f"cpr-for-{fork.pid}")
    assert (server.name(), fork.name()) == ("cpr-forksrv", "cpr-worker")
    worker.kill()
    wait_for_end(fork)
    assert server.is_running()


def test_workers_end_with_the_fork_server(server, start):
    worker = start("wait")
    fork = psutil.Process(report_of(worker)["pid"])
    server.kill()
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == -signal.SIGKILL
    wait_for_end(fork)
    output, _ = start("code", 0).communicate(timeout=DEADLINE_S)
    assert json.loads(output)["prepared_here"]


def test_fork_server_ends_with_the_agent_after_its_forks(server, start, agent):
    worker = start("wait")
    fork = psutil.Process(report_of(worker)["pid"])
    agent.kill()
    agent.communicate()
    time.sleep(0.1)
    assert fork.is_running()
    worker.kill()
    wait_for_end(fork)
    wait_for_end(server)


def test_no_fork_server_without_restarts(start, agent):
    output, _ = start("code", 0, restarts=0).communicate(timeout=DEADLINE_S)
    assert json.loads(output)["prepared_here"]
    assert not servers_of(agent)
