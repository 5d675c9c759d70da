"""Those who connect to a meeting and are no workers of it: they cost little and hold nobody up."""

import socket
import threading
import time
from collections import deque
from contextlib import ExitStack

import pytest

from cpr.rendezvous import leader as module
from cpr.rendezvous.join import join_at
from cpr.rendezvous.messages import PROOF_BYTES, proof
from cpr.rendezvous.rank_assignment import assign_ranks
from cpr.rendezvous.stores import serve
from tests.cpr.rendezvous.workers import (
    ENOUGH,
    HERE,
    call,
    check,
    info,
    is_hung_up,
    listener,
    post,
    posted_host,
)

pytestmark = pytest.mark.system

ENDLESS = 64 << 20


def knock(host):
    return socket.create_connection(("localhost", host.announcement.port), 5)


def hear_until(host, condition):
    deadline = time.monotonic() + ENOUGH.total_seconds()
    while not condition():
        assert time.monotonic() < deadline
        host.gather(time.monotonic() + 0.05)


def open_connections(host):
    return [key.data for key in host._selector.get_map().values() if key.data is not None]


def finish(host, workers, place):
    """Two guests come, and all three meet."""
    guests = [workers.submit(join_at, place(rank, 3), info(rank), ENOUGH) for rank in (1, 2)]
    infos = host.gather(time.monotonic() + ENOUGH.total_seconds())
    assert [each.pid for each in infos] == [0, 1, 2]
    store = serve(HERE, ENOUGH)
    host.tell(assign_ranks(infos), infos, store.port)
    assert {each.result().rank for each in guests} == {1, 2}


def pour(sock):
    """A line without end; how much of it was taken before the other side hung up."""
    sent = 0
    try:
        while sent < ENDLESS:
            sent += sock.send(b"x" * 65536)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\n" * 40,
        b"x" * (PROOF_BYTES - 1),
        bytes(PROOF_BYTES),
        proof("guessed", is_host=False) + b'{"rank": 1, "world_size": 3, "offer": {}}\n',
        "proof of a host",
    ],
)
def test_a_stranger_holds_nobody_up(workers, place, said):
    """One that is silent, talks HTTP, gives a wrong key or half of one, or a copy of what hosts show."""
    with posted_host(place, 3) as host, knock(host) as stranger:
        if isinstance(said, str):
            said = proof(host.announcement.nonce, is_host=True)
        stranger.sendall(said)
        finish(host, workers, place)
        assert not any(each.is_trusted for each in host._strangers)
        if len(said) >= PROOF_BYTES:
            assert is_hung_up(stranger)


def test_a_line_without_end_is_not_kept(workers, place):
    with posted_host(place, 3) as host, knock(host) as stranger:
        taken = []
        pouring = threading.Thread(target=lambda: taken.append(pour(stranger)))
        pouring.start()
        finish(host, workers, place)
        pouring.join()
        assert taken[0] < ENDLESS  # what fits into the kernel's buffers: the host hung up
        assert not host._strangers


def test_half_an_offer_and_then_silence(workers, place):
    """Of a worker that hangs, whose place is taken by the one that replaces it."""
    with posted_host(place, 3) as host:
        hanging = call(host)
        hanging.socket.sendall(b'{"rank": 1, "world_size": 3, "offer": {"pid"')
        finish(host, workers, place)
        hanging.close()


def test_thousands_of_silent_connections_do_not_pile_up(workers, place):
    with posted_host(place, 3) as host, ExitStack() as stack:
        latest = deque()

        def come():
            for _ in range(3000):
                latest.append(stack.enter_context(knock(host)))
                if len(latest) > 2 * module._MAX_STRANGERS:  # long turned away
                    latest.popleft().close()

        flood = threading.Thread(target=come)
        flood.start()
        most = 0
        while flood.is_alive():
            host.gather(time.monotonic() + 0.02)
            most = max(most, len(open_connections(host)))
        assert most <= module._MAX_STRANGERS
        hear_until(host, lambda: len(open_connections(host)) == module._MAX_STRANGERS)
        finish(host, workers, place)


def test_a_silent_stranger_has_to_go_after_a_while(place, monkeypatch):
    monkeypatch.setattr(module, "_STRANGER_S", 0.2)
    with posted_host(place, 3) as host, knock(host) as stranger:
        worker = call(host)
        hear_until(host, lambda: is_hung_up(stranger))
        assert not is_hung_up(worker.socket)  # its offer may take its time
        worker.close()


@pytest.mark.parametrize("answer", ["endless", "echo"])
def test_a_stranger_at_the_port_of_a_dead_host_is_told_no_key_and_not_listened_to(
    workers, agent, place, answer
):
    with listener() as stranger:
        post(agent, stranger.getsockname()[1], nonce="the old one")
        guest = workers.submit(join_at, place(1, 2), info(1), ENOUGH)
        caller, _ = stranger.accept()
        said = caller.recv(PROOF_BYTES, socket.MSG_WAITALL)
        assert said == proof("the old one", is_host=False)
        if answer == "echo":
            caller.sendall(said)
        else:
            assert pour(caller) < ENDLESS
        again, _ = stranger.accept()  # it hung up, and tries the only address that it knows once more
        check([workers.submit(join_at, place(0, 2), info(0), ENOUGH), guest])
        caller.close()
        again.close()
