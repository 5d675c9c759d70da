"""Threads in place of workers, and a real store in place of the agent's."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cpr.rendezvous.join import join_from
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.stores import serve
from tests.cpr.rendezvous.workers import ENOUGH, HERE, info


@pytest.fixture
def agent():
    """The agent's store, which survives generations of workers."""
    return serve(HERE, ENOUGH)


@pytest.fixture
def env(agent):
    def at(rank, world_size):
        return LauncherEnv(
            rank=rank, world_size=world_size, address="localhost", port=agent.port, of_agent=True
        )

    return at


@pytest.fixture
def workers():
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def join_as(workers, env):
    """Starts a worker of the launcher's rank; returns the future of its group."""

    def start(rank, world_size, pid=None, timeout=ENOUGH):
        info_of_worker = info(rank if pid is None else pid)
        return workers.submit(join_from, env(rank, world_size), info_of_worker, timeout)

    return start
