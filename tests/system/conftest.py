"""Real processes: started, watched, and never left behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.system.ranks import Ranks

REPO = Path(__file__).parents[2]


@pytest.fixture
def start():
    """Starts a program in the repository; whatever is left of it afterwards is killed by its pid."""
    started = []

    def work(*command, ranks=0, restarts=0, environment=None):
        if ranks:
            torchrun = Path(sys.executable).with_name("torchrun")
            workers = ("--nproc-per-node", ranks, "--max-restarts", restarts)
            command = (torchrun, "--standalone", *workers, *command)
        else:
            command = (sys.executable, *command)
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield work
    for process in started:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                each.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def start_ranks(tmp_path):
    """Starts the ranks of a process group; whatever is left of them afterwards is killed."""
    started = []

    def work(function, *arguments, world_size):
        started.append(Ranks(function, arguments, world_size, tmp_path))
        return started[-1]

    yield work
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def launcher():
    """Pid of a process that stands for the `cpr run` of a whole file: workers below it are prepared once."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()
