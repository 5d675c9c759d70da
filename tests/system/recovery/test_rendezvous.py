"""Restarts work at the first try under plain torchrun, however it is launched."""

import json

import pytest

from tests.system.runs import free_port

WORKER = ("-m", "tests.programs", "tests.system.recovery.rendezvous_worker")
"""Forks of a prepared process, so that each generation starts fast."""
NUM_DEATHS = 2


def generations(folder):
    """What the workers of each generation saw."""
    found = {}
    for file in folder.glob("*.json"):
        saw = json.loads(file.read_text())
        found.setdefault((saw["session"], saw["generation"]), []).append(saw)
    return list(found.values())


def check(world, world_size):
    assert sorted(each["rank"] for each in world) == list(range(world_size))
    assert {each["sum"] for each in world} == {sum(range(world_size))}
    by_rank = [each["pid"] for each in sorted(world, key=lambda each: each["rank"])]
    assert all(each["pids"] == by_rank for each in world)


@pytest.mark.system
@pytest.mark.timeout(240)
@pytest.mark.parametrize("style", ["plain", "static", "two agents"])
def test_restarts_work_at_the_first_try(start, tmp_path, style):
    """A worker kills itself with -9 in each generation but the last; torchrun may restart just as often.

    `--standalone` is what most other tests of restarts use.
    """
    port, restarts = free_port(), ("--max-restarts", NUM_DEATHS)
    two = ("--nnodes", 2, "--nproc-per-node", 1, *restarts)
    commands = {
        "plain": [("--nproc-per-node", 2, *restarts)],
        "static": [("--nproc-per-node", 2, "--master-port", port, *restarts)],
        "two agents": 2 * [(*two, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")],
    }[style]
    agents = [
        start("-m", "torch.distributed.run", *flags, *WORKER, tmp_path, NUM_DEATHS, forks=True)
        for flags in commands
    ]
    for agent in agents:
        _, said = agent.communicate(timeout=200)
        assert agent.returncode == 0, said[-4000:]
    worlds = generations(tmp_path)
    assert len(worlds) == NUM_DEATHS + 1
    for world in worlds:
        check(world, 2)
    assert sum(world[0]["continues"] for world in worlds) == NUM_DEATHS
