"""`cpr run` with real torchrun: an agent of two is killed, and the run continues by itself.

Each node gets the ranks again of which it has memory, whichever torchrun counts first afterwards.
"""

import os
import signal
import sys

import psutil
import pytest

from tests.system.recovery.test_rendezvous import WORKER, check, generations
from tests.system.runs import free_port, wait_for


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["keeps the rendezvous", "does not"])
def test_an_agent_is_killed_and_replaced(start, lender, tmp_path, victim):
    endpoint = f"localhost:{free_port()}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2)
    flags = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command = ("-m", "cpr.cli", "run", "--", *torchrun, *flags, *WORKER, tmp_path, -1)
    first = start(*command, environment=lender)
    wait_for(lambda: listens(first, endpoint))
    runs = [first, start(*command, environment=lender)]
    wait_for(lambda: len(list(tmp_path.glob("*.json"))) == 4)

    run = runs[0] if victim == "keeps the rendezvous" else runs[1]
    (agent,) = psutil.Process(run.pid).children()
    orphans = agent.children()
    os.kill(agent.pid, signal.SIGKILL)
    for each in runs:
        _, said = each.communicate(timeout=240)
        assert each.returncode == 0, said[-4000:]
    assert len(orphans) == 2
    assert not any(each.is_running() for each in orphans)

    before, after = sorted(generations(tmp_path), key=lambda world: world[0]["continues"])
    for world in (before, after):
        check(world, 4)
        for worker in world:
            rank, group_rank, local_rank = worker["environment"]
            assert (rank, group_rank, local_rank) == (worker["rank"], rank // 2, rank % 2)
    assert ranks_of_nodes(after) == ranks_of_nodes(before)
    assert sorted(ranks_of_nodes(after).values()) == [[0, 1], [2, 3]]


def ranks_of_nodes(world):
    """By `cpr run`."""
    return {
        launch: sorted(worker["rank"] for worker in world if worker["launch"] == launch)
        for launch in {worker["launch"] for worker in world}
    }


def listens(run, endpoint):
    """Whether the agent below `cpr run` has opened the rendezvous."""
    port = int(endpoint.rpartition(":")[2])
    agents = psutil.Process(run.pid).children()
    return any(each.laddr.port == port for agent in agents for each in agent.net_connections())
