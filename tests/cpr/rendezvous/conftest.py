"""Threads as workers, and a real store as the agent's."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.stores import serve
from tests.cpr.rendezvous.workers import ENOUGH, HERE


@pytest.fixture
def agent():
    """The agent's store, which outlives generations of workers."""
    return serve(HERE, ENOUGH)


@pytest.fixture
def place(agent):
    def at(rank, world_size):
        return LauncherEnv(
            rank=rank, world_size=world_size, address="localhost", port=agent.port, of_agent=True
        )

    return at


@pytest.fixture
def workers():
    with ThreadPoolExecutor(32) as pool:
        yield pool
