"""Helpers to find and watch fork servers and their forks."""

import json
import time
from pathlib import Path

import psutil

DEADLINE_S = 60.0


def environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def servers_of(agent):
    """The fork servers of an agent's workers."""
    marked = f"CPR_AGENT_PID={agent.pid}".encode()
    found = [psutil.Process(pid) for pid in psutil.pids() if marked in environment_of(pid)]
    return [process for process in found if process.name() == "cpr-forksrv"]


def report_of(process):
    return json.loads(process.stdout.readline())


def wait_for_name(process, name):
    comm = Path(f"/proc/{process.pid}/comm")
    wait_until(lambda: comm.read_text() == f"{name}\n", f"it is not called {name}")


def wait_for_end(process):
    wait_until(lambda: not is_alive(process), f"{process} is still alive")


def wait_until(happened, otherwise):
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
