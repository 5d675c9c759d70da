"""Processes of a run are found below its torchrun, and no other process gets a signal."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cpr.faults.worker_processes import find_workers, victim
from tests.cpr.faults.processes import python, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_workers_are_found_by_rank_with_their_agent(run):
    pid = run.agent(3, 0, 11)
    workers = find_workers(victim(pid))
    assert [worker.rank for worker in workers] == [0, 3, 11]
    assert {worker.agent for worker in workers} == {victim(pid)}
    assert all(worker.process == worker.started and worker.process.is_alive for worker in workers)


def test_children_of_a_worker_are_not_workers(run):
    """Children such as data loaders have the worker's rank in their environment, too."""
    root = victim(run.agent(0, command=python("import os, time; os.fork(); time.sleep(60)")))
    (worker,) = find_workers(root)
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
    wait_for(children.read_text)
    child = victim(int(children.read_text()))
    assert find_workers(root) == [worker]
    assert child.send(signal.SIGKILL)


def test_fork_of_a_proxy_is_found(run):
    """A proxy below torchrun names its fork, which is not its child."""
    (behind,) = run.workers(run.agent(5, command=named("cpr-worker")))
    wait_for(lambda: _name(behind.process) == "cpr-worker")
    pid = run.agent(0, command=named(f"cpr-for-{behind.process.pid}"))
    wait_for(lambda: run.workers(pid)[0].process == behind.process)
    (found,) = find_workers(victim(pid))
    assert found.processes == (behind.process, found.started)
    assert found.started != behind.process


def test_name_alone_does_not_make_a_worker(run):
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        name = f"cpr-for-{stranger.pid}"
        root = victim(run.agent(0, command=named(name)))
        wait_for(lambda: _name(find_workers(root)[0].started) == name)
        (worker,) = find_workers(root)
        assert worker.process == worker.started
    finally:
        stranger.kill()
        stranger.wait()


def named(name):
    """A command that sleeps under a process name."""
    return python(f'import ctypes, time; ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0); time.sleep(60)')


def _name(process):
    return Path(f"/proc/{process.pid}/comm").read_text().rstrip()


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid(), 1], ids=["this", "above", "init"])
def test_this_process_and_its_ancestors_are_refused(pid):
    with pytest.raises(ValueError, match=f"process {pid} is this one|process {pid} belongs"):
        victim(pid)


def test_a_pid_without_a_process_is_refused():
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ValueError, match=f"no process {ended.pid}"):
        victim(ended.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_processes_of_another_user_are_refused():
    nobody = subprocess.Popen(["sleep", "60"], user=65534, env={"RANK": "0"})
    try:
        with pytest.raises(ValueError, match="belongs to another user"):
            victim(nobody.pid)
    finally:
        nobody.kill()
        nobody.wait()
