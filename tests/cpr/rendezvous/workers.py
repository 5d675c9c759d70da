"""What tests of meetings share: workers that come, hosts that are posted, and callers of all kinds."""

import json
import socket
import time
from contextlib import contextmanager
from datetime import timedelta

from cpr.rendezvous import WorkerInfo
from cpr.rendezvous.discovery import Discovery
from cpr.rendezvous.join import join_at
from cpr.rendezvous.launcher_env import OwnAddress
from cpr.rendezvous.leader import Leader
from cpr.rendezvous.messages import Connection

ENOUGH = timedelta(seconds=60)
HERE = OwnAddress(name="localhost", interface="127.0.0.1")
KEY = "cpr/rendezvous/leader"


def info(pid=0, *held, restarted=True):
    return WorkerInfo(restarted=restarted, host="h", pid=pid, held=held)


def start(workers, place, world_size, infos=None, timeout=ENOUGH):
    """All workers of a generation."""
    infos = infos or [info(rank) for rank in range(world_size)]
    return [
        workers.submit(join_at, place(rank, world_size), infos[rank], timeout) for rank in range(world_size)
    ]


def check(futures, pids=None):
    """They met, agree on everything, and have a store that works; gives the meetings."""
    meetings = [each.result() for each in futures]
    assert sorted(each.rank for each in meetings) == list(range(len(meetings)))
    assert len({(each.session_id, each.generation, each.continues, each.infos) for each in meetings}) == 1
    assert {each.world_size for each in meetings} == {len(meetings)}
    counts = {each.store.add("here", 1) for each in meetings}
    assert counts == set(range(1, len(meetings) + 1))  # one store, the same for all, and new
    if pids is not None:
        assert [each.pid for each in meetings[0].infos] == pids
    return meetings


@contextmanager
def listener():
    with socket.create_server(("", 0)) as server:
        yield server


def post(agent, port, nonce="old"):
    agent.set(KEY, json.dumps({"address": "localhost", "port": port, "nonce": nonce}))


@contextmanager
def posted_host(place, world_size):
    """A host that does nothing by itself, announced."""
    with Leader(place(0, world_size), info()) as host:
        board = Discovery(place(0, world_size), host.announcement)
        try:
            while board.latest != host.announcement:
                time.sleep(0.01)
            yield host
        finally:
            board.close()


def seat(host, num_guests):
    """Let the host listen until so many guests sit there."""
    while len(host._guests) < num_guests:
        host.gather(time.monotonic() + 0.05)


def call(host):
    """The connection of one who knows the key."""
    return Connection.to("localhost", host.announcement.port, host.announcement.nonce, 5)


def is_hung_up(sock):
    """Whether the other side has ended the connection, after whatever it said."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:  # what was sent to it was not read
        return True
    return True
