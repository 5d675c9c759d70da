"""Which address others are told, and on which interface sockets listen."""

import socket

import psutil
import pytest

from cpr.rendezvous.launcher_env import LOOPBACK, LauncherEnv, OwnAddress
from cpr.rendezvous.leader import Leader
from tests.cpr.rendezvous.workers import check, info, listener, start


def at(address, rank=0, world_size=2, port=1, of_agent=True, **node):
    return LauncherEnv(
        rank=rank, world_size=world_size, address=address, port=port, of_agent=of_agent, **node
    )


@pytest.fixture
def network_address():
    """Of an interface of this machine that leads to others."""
    found = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and psutil.net_if_stats()[name].isup and each.address != LOOPBACK
    ]
    if not found:
        pytest.skip("this machine has no network interface but the loopback")
    return found[0]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()])
def test_on_the_machine_of_the_store_its_name_is_good_for_all(address):
    assert at(address).own_address().name == address


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")]
)
def test_where_the_launchers_address_is_loopback_sockets_listen_there_alone(address, interface):
    assert at(address).own_address().interface == interface
    assert socket.getaddrinfo("localhost", None)[0][4][0] == at("localhost").own_address().interface


def test_where_all_workers_are_on_one_machine_sockets_listen_on_its_loopback_alone(network_address):
    """As with --standalone, whose address may be the name of the machine."""
    place = at(network_address, local_world_size=2)
    assert place.own_address() == OwnAddress(name=LOOPBACK, interface=LOOPBACK)
    with Leader(place, info()) as host:
        assert host._listener.getsockname()[0] == LOOPBACK
        assert (host.announcement.address, host.announcement.port) == host._listener.getsockname()


def test_a_name_that_is_loopback_on_this_machine_alone_is_listened_to_everywhere(monkeypatch):
    """Debian's hosts file has the machine's own name so, which others look up in the network."""
    look_up = socket.getaddrinfo

    def with_hosts_file(name, *arguments, **options):
        return look_up("127.0.1.1" if name == "node7" else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", with_hosts_file)
    assert at("node7").own_address() == OwnAddress(name="node7", interface="")
    assert at("node7").store_interface() == ""
    assert at("node7", local_world_size=2).store_interface() == "127.0.1.1"
    with Leader(at("node7"), info()) as host:
        assert host._listener.getsockname()[0] == "0.0.0.0"


def test_over_a_network_sockets_listen_on_its_interface_alone(network_address):
    assert at(network_address).own_address() == OwnAddress(name=network_address, interface=network_address)
    elsewhere = network_address.rpartition(".")[0] + (
        ".253" if not network_address.endswith(".253") else ".252"
    )
    assert at(elsewhere).own_address() == OwnAddress(name=network_address, interface=network_address)
    assert at(elsewhere).store_interface() == ""  # rank 0 keeps the store, behind somebody else's address
    with Leader(at(network_address), info()) as host:
        assert host._listener.getsockname()[0] == network_address
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, host.announcement.port), 5)


def listening():
    """Address and port of each socket on which this process listens."""
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.system
@pytest.mark.parametrize("of_agent", [True, False])
def test_during_and_after_a_meeting_sockets_listen_on_the_jobs_interface_alone(agent, workers, of_agent):
    """Of the host, of the new store and, where rank 0 keeps it, of the launcher's."""
    port = agent.port
    if not of_agent:
        with listener() as free:
            port = free.getsockname()[1]
    before = listening()
    seen = set()
    meetings = start(workers, lambda rank, size: at(LOOPBACK, rank, size, port, of_agent), 3)
    while not all(each.done() for each in meetings):
        seen |= listening() - before
    check(meetings)
    assert {ip for ip, _ in seen} == {LOOPBACK}


def test_an_address_that_leads_nowhere_is_named():
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no\.such\.host\.invalid'"):
        at("no.such.host.invalid").own_address()
