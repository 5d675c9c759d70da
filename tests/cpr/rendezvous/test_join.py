"""Rendezvous of threads over a real store, with leaders and clients that die at every step."""

import os
import random
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_group_rank, get_local_rank, get_local_size

from cpr.errors import RendezvousError
from cpr.rendezvous import HeldSegment, WorkerGroup, init_process_group, join
from cpr.rendezvous.join import join_from
from cpr.rendezvous.rank_assignment import assign_ranks
from tests.cpr.rendezvous.workers import (
    ENOUGH,
    KEY,
    assign,
    call,
    check,
    env_at,
    free_port,
    info,
    is_closed_by_peer,
    listener,
    publish,
    published_leader,
    start,
    wait_for_clients,
)

pytestmark = pytest.mark.system

# --- without failures ---


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_all_workers_get_the_same_group(workers, env, world_size):
    check(start(workers, env, world_size), pids=list(range(world_size)))


def test_consecutive_generations_share_the_launchers_store(workers, env):
    sessions = [check(start(workers, env, 3))[0].session_id for _ in range(10)]
    assert len(set(sessions)) == 10


def test_ranks_of_a_node_stay_together_with_half_of_its_memory_lost(workers, agent):
    """Two nodes of two workers, which the launcher counts the other way round than before."""
    held = HeldSegment(session_id="s", rank=3, world_size=4, step_finished=5, generation=2)

    def at(rank, world_size):
        node = {"local_rank": rank % 2, "local_world_size": 2}
        return env_at(agent.port, rank, world_size, **node)

    infos = [info(10), info(11, held), info(12), info(13)]
    groups = check(start(workers, at, 4, infos), pids=[12, 13, 10, 11])
    assert [each.rank for each in groups] == [2, 3, 0, 1]
    assert (groups[0].session_id, groups[0].generation) == ("s", 3)


def test_rank_0_hosts_the_store_without_an_agent(workers):
    port = free_port()

    check(start(workers, partial(env_at, port, of_agent=False), 3))


def test_store_may_start_last(workers):
    port = free_port()

    futures = start(workers, partial(env_at, port), 2)
    time.sleep(0.2)
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    check(futures)
    del store


# --- what earlier generations left ---


@pytest.mark.parametrize("rubbish", ["", "{}", "[]", "no json", '{"address": 1}'])
def test_invalid_address_in_the_store_is_ignored(join_as, agent, rubbish):
    agent.set(KEY, rubbish)
    client = join_as(1, 2)
    time.sleep(0.1)
    check([join_as(0, 2), client])


def test_clients_stay_if_a_newer_leader_is_unreachable(join_as, agent, env):
    port = free_port()
    client = join_as(1, 2)
    with published_leader(env, 2) as leader:
        wait_for_clients(leader, 1)
        publish(agent, port)
        time.sleep(0.1)
        assign(leader)
    assert client.result().rank == 1


@pytest.mark.parametrize("num_notified", [1, 2])
def test_leader_dies_while_it_sends_the_assignment(join_as, env, num_notified):
    """Some clients have the assignment, but the store died with the leader."""
    clients = [join_as(rank, 3) for rank in (1, 2)]
    with published_leader(env, 3) as leader:
        infos = leader.gather(time.monotonic() + 60)
        for rank in list(leader._clients)[num_notified:]:
            leader._disconnect(leader._clients[rank][0])
        leader.send_assignment(assign_ranks(infos), infos, free_port())
    check([join_as(0, 3), *clients], pids=[0, 1, 2])


def test_dead_client_is_not_counted(join_as, env):
    with published_leader(env, 3) as leader:
        dying = call(leader)
        dying.send({"rank": 1, "world_size": 3, "info": asdict(info(66))})
        wait_for_clients(leader, 1)
        dying.close()
        while leader._clients:
            leader.gather(time.monotonic() + 0.05)
        assert leader.missing == [1, 2]
        clients = [join_as(rank, 3) for rank in (1, 2)]
        infos = leader.gather(time.monotonic() + 60)
        assert [each.pid for each in infos] == [0, 1, 2]
        leader.send_assignment(assign_ranks(infos), infos, 1)
    check([join_as(0, 3), *clients])


def test_new_worker_displaces_the_old_one_of_its_rank(join_as, env):
    orphan = join_as(1, 3, pid=66)
    with published_leader(env, 3) as leader:
        wait_for_clients(leader, 1)
        newer = [join_as(1, 3)]
        while not orphan.done():
            leader.gather(time.monotonic() + 0.05)
        with pytest.raises(RendezvousError, match="another process came as rank 1"):
            orphan.result()
        newer.append(join_as(2, 3))
        infos = assign(leader)
    assert [each.pid for each in infos] == [0, 1, 2]
    assert [each.result().infos for each in newer] == [tuple(infos)] * 2


def test_old_worker_may_end_when_the_new_one_joins(env):
    def message(pid):
        return {"rank": 1, "world_size": 3, "info": asdict(info(pid))}

    with published_leader(env, 3) as leader:
        old, newer = call(leader), call(leader)
        old.send(message(66))
        while leader.missing == [1, 2]:  # both are connected, and the old one has joined
            leader.gather(time.monotonic() + 0.05)
        newer.send(message(1))
        old.close()
        time.sleep(0.2)  # the leader receives both at once
        leader.gather(time.monotonic() + 0.5)
        assert leader.missing == [2]
        assert newer.wait(5)
        newer.close()


@pytest.mark.parametrize(
    "change", [{"world_size": 2}, {"rank": 7}, {"rank": 0}, {"info": {}}, {"info": {"held": 3}}, {"rank": []}]
)
def test_worker_of_another_launch_is_disconnected(env, change):
    with published_leader(env, 3) as leader:
        good = {"rank": 1, "world_size": 3, "info": asdict(info())}
        caller = call(leader)
        caller.send(good | change)
        while not is_closed_by_peer(caller.socket):
            leader.gather(time.monotonic() + 0.05)
        assert leader.missing == [1, 2]
        caller.close()


@pytest.mark.parametrize("seed", range(8))
def test_last_leader_wins_after_random_failures(join_as, workers, agent, env, seed):
    """Leaders that die at random steps, while clients come at random times."""
    chance = random.Random(seed)
    world_size = chance.randint(2, 5)
    delays = [chance.uniform(0, 0.3) for _ in range(world_size)]

    def client(rank):
        time.sleep(delays[rank])
        return join_from(env(rank, world_size), info(rank), ENOUGH)

    clients = [workers.submit(client, rank) for rank in range(1, world_size)]
    alive = []
    for _ in range(chance.randint(1, 4)):
        fate = chance.choice(["before publishing", "after publishing", "some joined", "assigned", "survives"])
        doomed = published_leader(env, world_size)
        if fate == "before publishing":
            continue
        leader = doomed.__enter__()
        if fate == "some joined":
            wait_for_clients(leader, chance.randint(1, world_size - 1))
        elif fate == "assigned":
            infos = leader.gather(time.monotonic() + 60)
            leader.send_assignment(assign_ranks(infos), infos, free_port())
        elif fate == "survives":
            alive.append(doomed)
            continue
        doomed.__exit__(None, None, None)
    check([join_as(0, world_size), *clients], pids=list(range(world_size)))
    for doomed in alive:
        doomed.__exit__(None, None, None)


# --- timeouts, with messages that name the missing ranks ---

SHORT = timedelta(seconds=1)
LONGER = timedelta(seconds=3)
"""Timeout for tests in which something has to happen before."""


def test_leader_names_missing_ranks(join_as):
    client = join_as(2, 4)
    leader = join_as(0, 4, timeout=LONGER)
    with pytest.raises(RendezvousError, match=r"ranks 1, 3 of 4 did not join the rendezvous within 3 s"):
        leader.result()
    check([join_as(rank, 4) for rank in (0, 1, 3)] + [client])


def test_leader_tells_ranks_that_never_came_from_those_that_left(join_as, env):
    client = join_as(2, 4, timeout=LONGER)
    with published_leader(env, 4) as leader:
        while 2 in leader.missing:
            leader.gather(time.monotonic() + 0.05)
        assert leader.absent == [1, 3]
        while not client.done():
            leader.gather(time.monotonic() + 0.05)
        leader.gather(time.monotonic() + 0.05)
        assert leader.missing == [1, 2, 3]
        assert leader.absent == [1, 3]
    assert client.exception()


def test_client_names_missing_ranks(join_as, workers, env):
    client = join_as(1, 4, timeout=LONGER)
    with published_leader(env, 4) as leader:
        while not client.done():
            leader.gather(time.monotonic() + 0.05)
    with pytest.raises(RendezvousError, match=r"no rendezvous .* within 3 s: ranks 2, 3 did not come"):
        client.result()


def test_client_reports_that_no_leader_came(env):
    with pytest.raises(RendezvousError, match=r"rank 0 .* has published no address in .*localhost"):
        join_from(env(1, 2), info(), SHORT)


def test_client_reports_an_address_of_an_earlier_leader(agent, env):
    port = free_port()
    publish(agent, port)
    with pytest.raises(RendezvousError, match=rf"rank 0 cannot be reached at \S+:{port}, .* of an earlier"):
        join_from(env(1, 2), info(), LONGER)


def test_frozen_leader_ends_in_a_timeout(agent, env):
    with listener() as frozen:
        publish(agent, frozen.getsockname()[1])
        with pytest.raises(RendezvousError, match=r"rank 0 at localhost:\d+ does not answer"):
            join_from(env(1, 2), info(), LONGER)


@pytest.fixture
def impatient(monkeypatch):
    """Ends threads blocked by a frozen or dead store with the test."""
    monkeypatch.setattr("cpr.rendezvous.discovery._CALL_TIMEOUT", timedelta(seconds=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_frozen_store_ends_in_a_timeout(impatient, rank):
    with listener() as frozen:
        port = frozen.getsockname()[1]
        where = env_at(port, rank)
        with pytest.raises(RendezvousError, match="it does not answer"):
            join_from(where, info(), SHORT)


def test_dead_store_is_named_with_a_remedy(impatient):
    port = free_port()
    where = env_at(port, 1)
    with pytest.raises(RendezvousError, match=rf"localhost:{port} cannot be reached .*cpr run -- torchrun"):
        join_from(where, info(), SHORT)


def test_taken_port_is_reported():
    with listener() as other:
        port = other.getsockname()[1]
        where = env_at(port, of_agent=False)
        with pytest.raises(RendezvousError, match="Address already in use"):
            join_from(where, info(), SHORT)


# --- the environment ---

LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def nowhere(monkeypatch):
    for name in (*LAUNCHED, "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_group_of_one_without_a_launcher(nowhere):
    worker_group = join(info(7, restarted=False), SHORT)
    assert (worker_group.rank, worker_group.world_size) == (0, 1)
    assert (worker_group.generation, worker_group.continues) == (0, False)
    init_process_group(worker_group, "gloo", SHORT)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_world_of_one_keeps_its_session(nowhere):
    for name, value in LAUNCHED.items():
        nowhere.setenv(name, value)
    held = HeldSegment(session_id="s", rank=0, world_size=1, step_finished=5, generation=2)
    worker_group = join(info(7, held), SHORT)
    assert (worker_group.rank, worker_group.session_id, worker_group.generation) == (0, "s", 3)


def test_torchrec_agrees_with_the_environment_of_the_new_rank(nowhere):
    """TorchRec derives nodes and devices from ranks."""
    node = {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**LAUNCHED, **node, "WORLD_SIZE": "4", "RANK": "1"}.items():
        nowhere.setenv(name, value)
    # this node is the launcher's first, and has memory of ranks 2 and 3
    fields = {"rank": 3, "world_size": 4, "session_id": "s", "generation": 1, "continues": True, "infos": ()}
    group = WorkerGroup(store=None, **fields)
    nowhere.setattr(sys.modules[join.__module__], "join_from", lambda *_: group)
    rank = join(info(), SHORT).rank
    assert (os.environ["RANK"], os.environ["GROUP_RANK"]) == ("3", "1")
    assert get_group_rank(4, rank) == int(os.environ["GROUP_RANK"])
    assert rank % get_local_size(4) == get_local_rank(4, rank) == int(os.environ["LOCAL_RANK"])


@pytest.mark.parametrize("missing", ["MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_incomplete_environment_is_refused(nowhere, missing):
    for name, value in LAUNCHED.items():
        if name != missing:
            nowhere.setenv(name, value)
    with pytest.raises(ValueError, match=f"{missing} is not: start workers by torchrun"):
        join(info(), SHORT)
