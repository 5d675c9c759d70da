"""Forks of the fork server behave like workers that started by themselves, and end with their proxies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cpr.forkserver.protocol import _address
from cpr.processes import Process
from tests.cpr.forkserver.processes import (
    DEADLINE_S,
    is_alive,
    report_of,
    servers_of,
    wait_for_end,
    wait_for_name,
    wait_until,
)

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


@pytest.mark.parametrize(
    ("end", "code"), [("raise", 1), ("kill", -signal.SIGKILL), ("dump", -signal.SIGSEGV)]
)
def test_proxy_ends_as_its_fork_and_leaves_one_core_file_at_most(server, start, tmp_path, end, code):
    worker = start(end)
    _, errors = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == code
    assert ("ValueError: what went wrong" in errors) == (end == "raise")
    assert len(list(tmp_path.glob("core*"))) <= 1


@pytest.mark.parametrize(("work", "is_stopped"), [("wait", False), ("wait", True), ("native", False)])
def test_killing_the_proxy_kills_the_fork(server, start, work, is_stopped):
    worker = start(work)
    fork = psutil.Process(report_of(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    wait_for_name(worker, f"cpr-for-{fork.pid}")
    assert (server.name(), fork.name()) == ("cpr-forksrv", "cpr-worker")
    if is_stopped:
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "it was not stopped")
        assert is_alive(fork)
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


@pytest.mark.parametrize(
    ("how", "says"), [({"restarts": 0}, ""), ({"more": {"THREAD": "1"}}, "other threads run in it")]
)
def test_no_fork_server_without_restarts_or_with_threads(start, agent, how, says):
    worker = start("code", 0, **how)
    output, errors = worker.communicate(timeout=DEADLINE_S)
    assert json.loads(output)["prepared_here"]
    assert worker.returncode == 0
    assert says in errors
    assert not servers_of(agent)


def test_the_next_generation_starts_when_dying_forks_have_ended(server, start, agent):
    """The fork server is busy when the proxy dies, and receives both events at once."""
    worker = start("large")
    fork = psutil.Process(report_of(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    server.suspend()
    worker.kill()
    worker.wait()
    following = start("code", 0)
    wait_until(lambda: num_waiting(agent) > 0, "the next worker did not ask")
    assert is_alive(fork)
    server.resume()
    seen = report_of(following)
    assert seen["parent"] == server.pid
    assert not is_alive(fork)


def num_waiting(agent):
    """Connections to its server process that it has not accepted: those have no inode in proc(5) yet."""
    name = _address(Process.find(agent.pid)).decode().replace("\0", "@")
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return len([line for line in lines if line[-1] == name and line[6] == "0"])


def test_worker_starts_by_itself_if_the_fork_server_dies(server, start, agent):
    server.suspend()  # it has accepted nothing yet, and the worker waits for its answer
    worker = start("code", 3)
    wait_until(lambda: num_waiting(agent) > 0, "the worker did not ask")
    server.kill()
    output, _ = worker.communicate(timeout=DEADLINE_S)
    assert json.loads(output)["prepared_here"]
    assert worker.returncode == 3
    assert len(servers_of(agent)) == 1  # the next one


def test_changed_code_is_not_forked(server, start, script, agent):
    script.write_text(script.read_text().replace('"rank"', '"changed_rank"'))
    workers = [start("code", 0, rank=rank) for rank in range(2)]
    for rank, worker in enumerate(workers):
        output, _ = worker.communicate(timeout=DEADLINE_S)
        seen = json.loads(output)
        assert seen["changed_rank"] == str(rank)
        assert seen["parent"] != server.pid
    wait_for_end(server)
    (following,) = servers_of(agent)
    assert report_of(start("code", 0))["parent"] == following.pid


def test_another_program_is_refused(server, start, script):
    other = script.with_name("other.py")
    other.write_text(script.read_text())
    output, _ = start("code", 0, rank=1, script=other).communicate(timeout=DEADLINE_S)
    assert json.loads(output)["prepared_here"]
    assert is_alive(server)


def test_child_of_a_fork_is_not_taken_for_a_worker(server, start):
    worker = start("nested", "code", 4, rank=1)
    output, _ = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 4
    fork, nested = map(json.loads, output.splitlines())
    assert fork["parent"] == server.pid
    assert nested["parent"] == fork["pid"]
    assert nested["prepared_here"]


def test_forks_have_different_random_numbers(start):
    first = start("random", more={"NUMPY": "1"})
    drawn = [numbers_of(first)] + [numbers_of(start("random", more={"NUMPY": "1"})) for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 6


def numbers_of(worker):
    output, _ = worker.communicate(timeout=DEADLINE_S)
    return json.loads(output.splitlines()[1])


def test_signals_are_forwarded_and_ignored_ones_stay_ignored(start):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    start("code", 0, **ignore).communicate(timeout=DEADLINE_S)
    worker = start("wait", **ignore)
    fork = psutil.Process(report_of(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    worker.send_signal(signal.SIGHUP)
    fork.send_signal(signal.SIGHUP)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 5


def test_workers_of_a_replaced_agent_are_forks(server, start, agent):
    """`cpr run` has replaced its torchrun: the new one's workers are forks as well."""
    launch = {"CPR_LAUNCH_PID": str(agent.pid)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as replacement:
        more = {**launch, "CPR_AGENT_PID": str(replacement.pid)}
        seen = report_of(start("code", 0, more=more, restarts=0))
        assert seen["parent"] == server.pid
        assert seen["agent"] == replacement.pid
        replacement.kill()


def test_other_users_are_refused(server, start, agent):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    address = _address(Process.find(agent.pid))
    probe = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.connect(b'\\0' + sys.argv[1].encode()); print(s.recv(1))"
    )
    stranger = subprocess.run(
        [sys.executable, "-c", probe, address[1:].decode()],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert stranger.stdout == "b''\n"  # closed without an answer
    assert is_alive(server)


def test_invalid_requests_are_ignored(server, start, agent):
    for content in (b"", b"\x01", b"\xff\xff\xff\xff", b"\x02\0\0\0[]"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(_address(Process.find(agent.pid)))
            client.sendall(content)
    assert report_of(start("code", 0))["parent"] == server.pid
