"""Threads in place of workers, and a real store in place of the agent's."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from cpr.rendezvous.discovery import serve
from cpr.rendezvous.join import join_from
from tests.cpr.rendezvous.workers import ENOUGH, HERE, env_at, info


@pytest.fixture
def agent():
    """The agent's store, which survives generations of workers."""
    return serve(HERE, ENOUGH)


@pytest.fixture
def env(agent):
    return partial(env_at, agent.port)


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
