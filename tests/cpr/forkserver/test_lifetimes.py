"""Who ends with whom, who is refused, and what a fork has of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cpr.forkserver.protocol import _address
from cpr.processes import Process
from tests.cpr.forkserver.processes import (
    DEADLINE_S,
    is_alive,
    prepared_for,
    said_by,
    wait_for_end,
    wait_until,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_fork_deep_in_native_code_ends_with_its_borrower(prepared, start):
    worker = start("native")
    fork = psutil.Process(said_by(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    worker.kill()
    wait_for_end(fork)


def test_it_ends_with_a_borrower_that_was_stopped(prepared, start):
    worker = start("wait")
    fork = psutil.Process(said_by(worker)["pid"])
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "it was not stopped")
    assert is_alive(fork)
    worker.kill()
    wait_for_end(fork)


def test_a_crash_is_the_borrowers_end_and_leaves_one_core_file_at_most(prepared, start, tmp_path):
    worker = start("dump")
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == -signal.SIGSEGV
    assert len(list(tmp_path.glob("core*"))) <= 1


def test_the_next_generation_starts_when_dying_forks_have_ended(prepared, start, agent):
    """The prepared process is busy when the borrower dies, and finds both words at once."""
    worker = start("large")
    fork = psutil.Process(said_by(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    prepared.suspend()
    worker.kill()
    worker.wait()
    following = start("code", 0)
    wait_until(lambda: num_waiting(agent) > 0, "the next worker did not ask")
    assert is_alive(fork)
    prepared.resume()
    seen = said_by(following)
    assert seen["parent"] == prepared.pid
    assert not is_alive(fork)


def num_waiting(agent):
    """Connections to its prepared process that it has not accepted: those have no inode in proc(5) yet."""
    name = _address(Process.find(agent.pid)).decode().replace("\0", "@")
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return len([line for line in lines if line[-1] == name and line[6] == "0"])


def test_a_prepared_process_that_dies_in_between_is_done_without(prepared, start, agent):
    prepared.suspend()  # it has accepted nothing yet, and the worker waits for its answer
    worker = start("code", 3)
    wait_until(lambda: num_waiting(agent) > 0, "the worker did not ask")
    prepared.kill()
    said, _ = worker.communicate(timeout=DEADLINE_S)
    assert json.loads(said)["prepared_here"]
    assert worker.returncode == 3
    assert len(prepared_for(agent)) == 1  # the next one


def test_changed_code_is_not_lent(prepared, start, script, agent):
    script.write_text(script.read_text().replace('"rank"', '"changed_rank"'))
    workers = [start("code", 0, rank=rank) for rank in range(2)]
    for rank, worker in enumerate(workers):
        said, _ = worker.communicate(timeout=DEADLINE_S)
        seen = json.loads(said)
        assert seen["changed_rank"] == str(rank)
        assert seen["parent"] != prepared.pid
    wait_for_end(prepared)
    (following,) = prepared_for(agent)
    assert said_by(start("code", 0))["parent"] == following.pid


def test_another_program_below_the_same_agent_is_not_served(prepared, start, script):
    other = script.with_name("other.py")
    other.write_text(script.read_text())
    said, _ = start("code", 0, rank=1, script=other).communicate(timeout=DEADLINE_S)
    assert json.loads(said)["prepared_here"]
    assert is_alive(prepared)


def test_what_a_fork_starts_is_not_taken_for_a_worker_of_its_agent(prepared, start):
    worker = start("nested", "code", 4, rank=1)
    said, _ = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 4
    fork, nested = map(json.loads, said.splitlines())
    assert fork["parent"] == prepared.pid
    assert nested["parent"] == fork["pid"]
    assert nested["prepared_here"]


def test_forks_draw_numbers_of_their_own(start):
    first = start("random", more={"NUMPY": "1"})
    drawn = [numbers_of(first)] + [numbers_of(start("random", more={"NUMPY": "1"})) for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 6


def numbers_of(worker):
    said, _ = worker.communicate(timeout=DEADLINE_S)
    return json.loads(said.splitlines()[1])


def test_signals_that_were_to_be_ignored_still_are(start):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    start("code", 0, **ignore).communicate(timeout=DEADLINE_S)
    worker = start("wait", **ignore)
    fork = psutil.Process(said_by(worker)["pid"])
    assert worker.stdout.readline() == "waiting\n"
    worker.send_signal(signal.SIGHUP)
    fork.send_signal(signal.SIGHUP)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 5


def test_a_process_with_threads_is_not_left_behind(start, agent):
    worker = start("code", 0, more={"THREAD": "1"})
    _, told = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0
    assert "other threads run in it" in told
    assert not prepared_for(agent)


def test_another_agent_below_the_same_launch_is_served(prepared, start, agent):
    """`cpr run` has replaced its torchrun: the new one's workers are forks all the same."""
    launch = {"CPR_LAUNCH_PID": str(agent.pid)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as replacement:
        more = {**launch, "CPR_AGENT_PID": str(replacement.pid)}
        seen = said_by(start("code", 0, more=more, restarts=0))
        assert seen["parent"] == prepared.pid
        assert seen["agent"] == replacement.pid
        replacement.kill()


def test_other_users_are_refused(prepared, start, agent):
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
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
    assert stranger.stdout == "b''\n"  # closed without a word
    assert is_alive(prepared)


def test_a_client_that_says_nonsense_changes_nothing(prepared, start, agent):
    for content in (b"", b"\x01", b"\xff\xff\xff\xff", b"\x02\0\0\0[]"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(_address(Process.find(agent.pid)))
            client.sendall(content)
    assert said_by(start("code", 0))["parent"] == prepared.pid
