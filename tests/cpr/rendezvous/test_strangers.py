"""Processes that connect to a rendezvous and are not its workers neither delay nor overload it."""

import socket
import threading
import time
from collections import deque
from contextlib import ExitStack

import pytest

from cpr.rendezvous import leader as module
from cpr.rendezvous.messages import PROOF_BYTES, proof
from tests.cpr.rendezvous.workers import (
    ENOUGH,
    assign,
    call,
    check,
    is_closed_by_peer,
    listener,
    publish,
    published_leader,
)

pytestmark = pytest.mark.system

ENDLESS = 64 << 20


def knock(leader):
    return socket.create_connection(("localhost", leader.address.port), 5)


def gather_until(leader, condition):
    deadline = time.monotonic() + ENOUGH.total_seconds()
    while not condition():
        assert time.monotonic() < deadline
        leader.gather(time.monotonic() + 0.05)


def open_connections(leader):
    return [key.data for key in leader._selector.get_map().values() if key.data is not None]


def finish(leader, join_as):
    """Two clients join, and the rendezvous completes."""
    clients = [join_as(rank, 3) for rank in (1, 2)]
    assert [each.pid for each in assign(leader)] == [0, 1, 2]
    assert {each.result().rank for each in clients} == {1, 2}


def pour(sock):
    """Send an endless line; returns the bytes sent before the peer closed the connection."""
    sent = 0
    try:
        while sent < ENDLESS:
            sent += sock.send(b"x" * 65536)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\n" * 40,
        b"x" * (PROOF_BYTES - 1),
        bytes(PROOF_BYTES),
        proof("guessed", is_leader=False) + b'{"rank": 1, "world_size": 3, "info": {}}\n',
        "proof of a leader",
    ],
)
def test_stranger_does_not_delay_the_rendezvous(join_as, env, sent):
    """A stranger may be silent, talk HTTP, or send a wrong, a partial, or a leader's proof."""
    with published_leader(env, 3) as leader, knock(leader) as stranger:
        if isinstance(sent, str):
            sent = proof(leader.address.nonce, is_leader=True)
        stranger.sendall(sent)
        finish(leader, join_as)
        assert not any(each.is_trusted for each in leader._strangers)
        if len(sent) >= PROOF_BYTES:
            assert is_closed_by_peer(stranger)


def test_endless_line_is_not_stored(join_as, env):
    with published_leader(env, 3) as leader, knock(leader) as stranger:
        taken = []
        pouring = threading.Thread(target=lambda: taken.append(pour(stranger)))
        pouring.start()
        finish(leader, join_as)
        pouring.join()
        assert taken[0] < ENDLESS  # what fits into the kernel's buffers: the leader closed the connection
        assert not leader._strangers


def test_partial_info_does_not_block_the_rank(join_as, env):
    """Of a worker that hangs, whose env is taken by the one that replaces it."""
    with published_leader(env, 3) as leader:
        hanging = call(leader)
        hanging.socket.sendall(b'{"rank": 1, "world_size": 3, "info": {"pid"')
        finish(leader, join_as)
        hanging.close()


def test_number_of_strangers_is_limited(join_as, env):
    with published_leader(env, 3) as leader, ExitStack() as stack:
        latest = deque()

        def come():
            for _ in range(3000):
                latest.append(stack.enter_context(knock(leader)))
                if len(latest) > 2 * module._MAX_STRANGERS:  # long turned away
                    latest.popleft().close()

        flood = threading.Thread(target=come)
        flood.start()
        most = 0
        while flood.is_alive():
            leader.gather(time.monotonic() + 0.02)
            most = max(most, len(open_connections(leader)))
        assert most <= module._MAX_STRANGERS
        gather_until(leader, lambda: len(open_connections(leader)) == module._MAX_STRANGERS)
        finish(leader, join_as)


def test_silent_stranger_is_disconnected(env, monkeypatch):
    monkeypatch.setattr(module, "_STRANGER_S", 0.2)
    with published_leader(env, 3) as leader, knock(leader) as stranger:
        worker = call(leader)
        gather_until(leader, lambda: is_closed_by_peer(stranger))
        assert not is_closed_by_peer(worker.socket)  # its info may take longer
        worker.close()


@pytest.mark.parametrize("answer", ["silent", "close", "http", "endless", "echo"])
def test_stranger_at_the_port_of_a_dead_leader_is_ignored(join_as, agent, answer):
    with listener() as stranger:
        publish(agent, stranger.getsockname()[1], nonce="the old one")
        client = join_as(1, 2)
        caller, _ = stranger.accept()
        received = caller.recv(PROOF_BYTES, socket.MSG_WAITALL)
        assert received == proof("the old one", is_leader=False)  # not the key itself
        if answer == "close":
            caller.close()
        elif answer == "http":
            caller.sendall(b"HTTP/1.1 400 Bad Request\n\n")
            caller.close()
        elif answer == "echo":
            caller.sendall(received)
        elif answer == "endless":
            assert pour(caller) < ENDLESS
        check([join_as(0, 2), client])
        caller.close()
