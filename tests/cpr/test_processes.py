"""Processes are identified by pid and start time, and only live ones are found."""

import os
import signal
import subprocess
import sys

import pytest

from cpr.processes import Process, Status


@pytest.fixture
def child():
    """A sleeping process."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_live_process_is_found_and_gets_signals(child):
    found = Process.find(child.pid)
    assert found.is_alive
    assert found.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert not found.is_alive


def test_zombie_is_gone(child):
    found = Process.find(child.pid)
    found.send(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Process.find(child.pid) is None
    assert not found.is_alive
    assert not found.send(signal.SIGKILL)


def test_earlier_process_with_the_same_pid_is_another_one(child):
    found = Process.find(child.pid)
    earlier = Process(found.pid, found.start_ticks - 1)
    assert not earlier.is_alive
    assert not earlier.send(signal.SIGKILL)
    assert child.poll() is None


def test_status_has_parent_and_session(child):
    status = Status.of(child.pid)
    assert status == Status(Process.find(child.pid), parent=os.getpid(), session=child.pid)
    assert Process.this().pid == os.getpid()
    assert Process.this().start_ticks <= status.process.start_ticks


def test_name_may_contain_anything():
    """proc(5) contains the name unescaped, before most fields."""
    code = (
        f"import ctypes; ctypes.CDLL(None).prctl(15, {b') Z 1 ('!r}, 0, 0, 0); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as named:
        named.stdout.readline()
        assert Status.of(named.pid).parent == os.getpid()
