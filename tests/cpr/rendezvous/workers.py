"""Helpers of rendezvous tests: workers, published leaders, and connections of all kinds."""

import json
import socket
import time
from contextlib import contextmanager
from datetime import timedelta

from cpr.rendezvous import WorkerInfo
from cpr.rendezvous.discovery import Discovery, serve
from cpr.rendezvous.join import join_from
from cpr.rendezvous.launcher_env import LauncherEnv, OwnAddress
from cpr.rendezvous.leader import Leader
from cpr.rendezvous.messages import Connection
from cpr.rendezvous.rank_assignment import assign_ranks

ENOUGH = timedelta(seconds=60)
HERE = OwnAddress(name="localhost", interface="127.0.0.1")
KEY = "cpr/rendezvous/leader"


def info(pid=0, *held, restarted=True):
    return WorkerInfo(restarted=restarted, host="h", pid=pid, held=held)


def start(workers, env, world_size, infos=None, timeout=ENOUGH):
    """Start all workers of a generation; returns the futures of their groups."""
    infos = infos or [info(rank) for rank in range(world_size)]
    return [
        workers.submit(join_from, env(rank, world_size), infos[rank], timeout) for rank in range(world_size)
    ]


def check(futures, pids=None):
    """Check that all workers joined, agree on everything, and have a working store; returns their groups."""
    groups = [each.result() for each in futures]
    assert sorted(each.rank for each in groups) == list(range(len(groups)))
    assert len({(each.session_id, each.generation, each.continues, each.infos) for each in groups}) == 1
    assert {each.world_size for each in groups} == {len(groups)}
    counts = {each.store.add("here", 1) for each in groups}
    assert counts == set(range(1, len(groups) + 1))  # one store, the same for all, and new
    if pids is not None:
        assert [each.pid for each in groups[0].infos] == pids
    return groups


@contextmanager
def listener():
    with socket.create_server(("", 0)) as server:
        yield server


def env_at(port, rank=0, world_size=2, **fields):
    """The environment of a worker whose launcher's store is on this machine."""
    fields = {"of_agent": True, **fields}
    return LauncherEnv(rank=rank, world_size=world_size, address="localhost", port=port, **fields)


def free_port():
    with listener() as free:
        return free.getsockname()[1]


def publish(agent, port, nonce="old"):
    agent.set(KEY, json.dumps({"address": "localhost", "port": port, "nonce": nonce}))


@contextmanager
def published_leader(env, world_size):
    """A published leader that does nothing by itself."""
    with Leader(env(0, world_size), info()) as leader:
        discovery = Discovery(env(0, world_size), leader.address)
        try:
            while discovery.latest != leader.address:
                time.sleep(0.01)
            yield leader
        finally:
            discovery.close()


def wait_for_clients(leader, num_clients):
    """Let the leader gather until it has `num_clients` clients."""
    while len(leader._clients) < num_clients:
        leader.gather(time.monotonic() + 0.05)


def assign(leader):
    """Let the leader gather all clients and send them an assignment; returns their infos."""
    infos = leader.gather(time.monotonic() + 60)
    leader.store = serve(HERE, ENOUGH)  # an attribute, as a store ends with its object
    leader.send_assignment(assign_ranks(infos), infos, leader.store.port)
    return infos


def call(leader):
    """A connection of a client that knows the key."""
    return Connection.to("localhost", leader.address.port, leader.address.nonce, 5)


def is_closed_by_peer(sock):
    """Whether the peer has closed the connection, perhaps after some data."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:  # what was sent to it was not read
        return True
    return True
