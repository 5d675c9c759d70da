"""A run's home on an ordinary folder, children that can be killed, and small memory."""

import os
import signal
import subprocess

import pytest

from cpr.resident.home import Home
from tests import forks


@pytest.fixture
def home(tmp_path):
    return Home("run", tmp_path)


@pytest.fixture
def small_root(tmp_path):
    """A memory file system of 2 MB."""
    root = tmp_path / "small"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", root]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield root
    subprocess.run(["umount", "-l", root], check=True)


@pytest.fixture
def start():
    """Starts `work(pipe, ...)` in a process of its own; those that live at the end are killed."""
    children = []
    context = forks.context(["cpr.resident.home", "cpr.resident.copy_out", "cpr.resident.replica"])

    def begin(work, *arguments):
        ours, theirs = context.Pipe()
        child = context.Process(target=_run, args=(work, theirs, *arguments), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
        return child, ours

    yield begin
    for child, pipe in children:
        child.kill()
        child.join()
        pipe.close()


def _run(work, pipe, *arguments):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    work(pipe, *arguments)
    pipe.close()
    os._exit(0)
