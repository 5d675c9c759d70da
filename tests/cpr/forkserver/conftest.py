"""Workers as torchrun would start them, with another process in place of its agent."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpr.forkserver.processes import DEADLINE_S, servers_of, wait_for_end

WORKER = Path(__file__).with_name("worker.py")
REPO = Path(__file__).parents[3]


@pytest.fixture
def agent():
    """A process in place of torchrun's agent, which the fork server only watches."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    left = servers_of(process)
    process.kill()
    process.communicate()
    for each in left:
        wait_for_end(each)


@pytest.fixture
def script(tmp_path):
    """A copy of the worker's script for this test."""
    return Path(shutil.copy(WORKER, tmp_path / "train.py"))


@pytest.fixture
def start(agent, script, tmp_path):
    started = []

    def work(*arguments, rank=0, restarts=3, script=script, more=None, **how):
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "CPR_AGENT_PID": str(agent.pid),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            **(more or {}),
        }
        command = [sys.executable, str(script), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes, **how)
        started.append(process)
        return process

    yield work
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def server(start, agent):
    """The server process, left behind by a first worker that has ended."""
    first = start("code", 0)
    output, _ = first.communicate(timeout=DEADLINE_S)  # the fork server does not hold the streams open
    assert json.loads(output)["prepared_here"]
    found = servers_of(agent)
    assert len(found) == 1
    yield found[0]
    if found[0].is_running():
        found[0].resume()
