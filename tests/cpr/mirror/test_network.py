"""Whatever happens to the network, training goes on, and a mirror has the rows of some whole step."""

import logging
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from cpr.mirror import link
from cpr.mirror.copy import MOMENTS_KEPT, digest_of
from cpr.mirror.keeper import Keeper
from cpr.rendezvous.launcher_env import LOOPBACK, OwnAddress
from cpr.resident.home import Home
from tests.cpr.mirror.test_mirror import Pair, wait_for

PATIENCE_S = 0.2
FOREVER_S = 3600.0


class Network:
    """A network between an owner and a keeper: it may lose everything, or end connections."""

    def __init__(self, keeper):
        self._keeper = keeper
        self._server = socket.create_server((LOOPBACK, 0))
        self.address = replace(keeper, port=self._server.getsockname()[1])
        self.is_cut = False
        """Whether what is sent gets lost, without a word."""
        self.is_deaf = False
        """Whether what the keeper says gets lost."""
        self.budget = None
        """Bytes to the keeper after which connections end."""
        self._sockets, self._threads = [], []
        self._start(self._accept)

    def close(self):
        for each in [self._server, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for each in self._threads:
            each.join()

    def _start(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                owner, _ = self._server.accept()
                keeper = socket.create_connection((LOOPBACK, self._keeper.port))
                self._sockets += [owner, keeper]
                self._start(self._forward, owner, keeper, True)
                self._start(self._forward, keeper, owner, False)

    def _forward(self, source, target, is_to_keeper):
        with suppress(OSError):
            while data := source.recv(1 << 12):
                if self.is_cut or (self.is_deaf and not is_to_keeper):
                    continue
                if self.budget is not None and is_to_keeper:
                    data, self.budget = data[: self.budget], max(0, self.budget - len(data))
                target.sendall(data)
                if self.budget == 0:
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("cpr.mirror.link.PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("cpr.mirror.mirror.LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def pair(request, world_of_one, tmp_path):
    made = Pair(tmp_path, **getattr(request, "param", {}))
    made.networks = []
    made.train(10)
    yield made
    made.mirror.close(remove=True)
    for each in made.networks:
        each.close()


@pytest.fixture
def network(pair):
    pair.networks.append(Network(pair.keeper.address))
    pair.mirror._place = pair.networks[0].address
    pair.mirror._link.close()
    pair.train(1)
    pair.train(1)
    assert pair.check_newest() == pair.steps
    return pair.networks[0]


@pytest.fixture
def second(pair, tmp_path):
    """A keeper on another node."""
    (tmp_path / "second").mkdir()
    made = Keeper(Home("run", tmp_path / "second"), OwnAddress(name=LOOPBACK, interface=LOOPBACK), "s")
    yield made
    made.close(remove=True)


def held(mirror):
    """Bytes that a mirror holds besides the rows."""
    changed = [rows for of_pass in mirror._changed._changed for rows in of_pass.values()]
    return mirror._staging.nbytes + sum(rows.nbytes for rows in [*changed, *mirror._kept.values()])


def test_a_network_that_was_cut_costs_age_and_no_rows(pair, network, monkeypatch, caplog):
    """Cut for much longer than anyone waits: training goes on, and what is owed does not grow with time."""
    monkeypatch.setattr("cpr.mirror.changed_rows.COMPACT_ABOVE", 0)
    caplog.set_level(logging.INFO)
    step, connects = pair.check_newest(), []
    connect = pair.mirror._connect
    monkeypatch.setattr(pair.mirror, "_connect", lambda place: (connects.append(place), connect(place)))
    network.is_cut = True
    sizes = []
    while len(connects) < 3:
        pair.train(5, wait=False)
        sizes.append(held(pair.mirror))
        assert pair.check_newest() == step
        assert pair.mirror.figures.age == pair.steps - step
    limit = sum(live.num_rows * (live.bytes_per_row + 16) for live in pair.shards)
    assert max(sizes) < 2 * limit + 2**14
    assert caplog.text.count(f"the mirror of rank 3 stays at step {step}") == 1
    network.is_cut = False
    pair.arrive()
    pair.train(1)
    assert pair.check_newest() == pair.steps
    assert pair.mirror.figures.oldest >= pair.steps - step - 1
    assert "the mirror of rank 3 is sent again" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_an_owner_that_dies_while_it_sends_leaves_the_moment_before(pair, network, share):
    before = pair.check_newest()
    num_bytes = pair.mirror.figures.num_bytes // pair.mirror.figures.moments
    network.budget = int(share * num_bytes)
    pair.train(1, wait=False)
    wait_for(lambda: network.budget == 0)
    assert pair.check_newest() == before
    network.budget = None
    pair.arrive()
    pair.train(1)
    assert pair.check_newest() == pair.steps


def test_a_moment_of_which_the_owner_does_not_know_that_it_has_arrived_is_no_trouble(pair, network):
    network.is_deaf = True
    pair.train(1, wait=False)
    wait_for(lambda: pair.mirror._lost_s is not None)
    assert pair.check_newest() == pair.steps == pair.mirror.step_sent + 1
    network.is_deaf = False
    pair.arrive()
    pair.train(1)
    assert pair.check_newest() == pair.steps == pair.mirror.step_sent


def test_a_slow_network_is_not_taken_for_a_lost_one(monkeypatch):
    """A message may take longer than anyone waits for a part of it."""
    monkeypatch.setattr("cpr.mirror.link.CHUNK_BYTES", 1 << 14)
    data = torch.zeros(1 << 18, dtype=torch.uint8)
    with socket.create_server((LOOPBACK, 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        sender = link.Link(link.KeeperAddress(address=LOOPBACK, port=server.getsockname()[1], key=""))
        sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        receiver, _ = server.accept()
        pause = threading.Event()

        def receive_slowly():
            left = data.numel() + 8 * link.WORDS
            while left:
                pause.wait(2 * PATIENCE_S / 32)
                left -= len(receiver.recv(min(left, 1 << 13)))
            link.send_text(receiver, "")

        thread = threading.Thread(target=receive_slowly)
        thread.start()
        sender.send_rows(data)
        thread.join()
        receiver.close()
        sender.close()


@pytest.mark.parametrize("pair", [{}, {"rows": "priority", "memory": "1500B"}], indirect=True)
def test_a_keeper_that_is_lost_for_long_is_replaced_by_the_next_one(
    pair, network, second, monkeypatch, caplog
):
    monkeypatch.setattr("cpr.mirror.mirror.SWITCH_AFTER_S", FOREVER_S)
    pair.mirror._others = [second.address]
    step, first = pair.check(), pair.copy.segment
    network.is_cut = True
    pair.train(1, wait=False)
    wait_for(lambda: pair.mirror._lost_s is not None)
    assert not second._copies, "it may come back"
    monkeypatch.setattr("cpr.mirror.mirror.SWITCH_AFTER_S", 0.0)
    wait_for(lambda: second._copies)
    monkeypatch.setattr("cpr.mirror.mirror.SWITCH_AFTER_S", FOREVER_S)  # this machine may be slow, too
    assert pair.check(first) == step, "until the new one is whole, the old one counts"
    network.is_cut = False
    pair.arrive()
    pair.train(10)
    assert second._copies[3].step == pair.steps == pair.mirror.step_sent
    assert pair.check(second._copies[3].segment) == pair.steps - MOMENTS_KEPT
    assert all(held["weights"].numel() for _, held in pair.rows(second._copies[3].segment))
    assert pair.check(first) == step
    assert f"the mirror of rank 3 goes to {LOOPBACK}, and is filled" in caplog.text
    monkeypatch.setattr("cpr.mirror.mirror.SWITCH_AFTER_S", 0.0)
    pair.mirror._link.close()
    second.close(remove=False)
    pair.train(1, wait=False)
    pair.arrive()
    pair.train(10)
    assert pair.check() == pair.steps - MOMENTS_KEPT, (
        "the first one is the second choice now, and has an empty mirror before"
    )
    assert pair.copy.segment is not first


def test_a_mirror_that_lacks_most_rows_is_filled_anew(pair, network, monkeypatch, caplog):
    """The keeper need not have room for a second copy of all rows."""
    monkeypatch.setattr("cpr.mirror.mirror.MOST_OWED", 0.0)
    monkeypatch.setattr("cpr.mirror.mirror.MOST_OWED_BYTES", 0)
    first = pair.copy
    network.is_cut = True
    pair.train(1, wait=False)
    wait_for(lambda: pair.mirror._lost_s is not None)
    network.is_cut = False
    pair.arrive()
    pair.train(2)
    assert pair.copy is not first
    assert pair.copy.step is None, "what the keeper had counts no more"
    pair.train(10)
    assert pair.check() == pair.steps - MOMENTS_KEPT
    assert "the mirror of rank 3 is filled anew" in caplog.text


def test_a_keeper_that_cannot_be_reached_at_the_start_is_replaced_by_the_next_one(pair, second, caplog):
    with socket.create_server((LOOPBACK, 0)) as gone:
        nobody = replace(second.address, port=gone.getsockname()[1])
    chosen = pair.mirror._connect_to_any([nobody, second.address])
    assert chosen == [second.address]
    assert "Connection refused" in caplog.text
    pair.mirror._link.close()


def test_a_moment_whose_bytes_differ_is_not_adopted(pair, network, monkeypatch):
    before = pair.check_newest()
    monkeypatch.setattr("cpr.mirror.mirror.digest_of", lambda data: (digest_of(data)[0] ^ 1, 0))
    pair.train(1, wait=False)
    wait_for(lambda: pair.mirror._lost_s is not None)
    assert pair.check_newest() == before
    monkeypatch.setattr("cpr.mirror.mirror.digest_of", digest_of)
    pair.arrive()
    pair.train(1)
    assert pair.check_newest() == pair.steps
