"""The published address of a machine, and the interfaces on which sockets listen."""

import socket

import psutil
import pytest

from cpr.rendezvous.launcher_env import LOOPBACK, LauncherEnv, OwnAddress
from cpr.rendezvous.leader import Leader
from tests.cpr.rendezvous.workers import check, free_port, info, start


def at(address, rank=0, world_size=2, port=1, of_agent=True, **node):
    return LauncherEnv(
        rank=rank, world_size=world_size, address=address, port=port, of_agent=of_agent, **node
    )


@pytest.fixture
def network_address():
    """Address of a network interface of this machine besides loopback."""
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
def test_machine_of_the_store_publishes_the_name_of_the_store(address):
    assert at(address).own_address().name == address


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")]
)
def test_sockets_listen_on_loopback_only_if_the_store_does(address, interface):
    assert at(address).own_address().interface == interface
    assert socket.getaddrinfo("localhost", None)[0][4][0] == at("localhost").own_address().interface


def test_sockets_of_one_machine_listen_on_loopback_only(network_address):
    """As with --standalone, whose address may be the name of the machine."""
    env = at(network_address, local_world_size=2)
    assert env.own_address() == OwnAddress(name=LOOPBACK, interface=LOOPBACK)
    with Leader(env, info()) as leader:
        assert leader._listener.getsockname()[0] == LOOPBACK
        assert (leader.address.address, leader.address.port) == leader._listener.getsockname()


def test_name_that_is_loopback_here_only_listens_on_all_interfaces(monkeypatch):
    """Debian's hosts file maps the machine's own name to loopback; other machines look it up in the
    network."""
    look_up = socket.getaddrinfo

    def with_hosts_file(name, *arguments, **options):
        return look_up("127.0.1.1" if name == "node7" else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", with_hosts_file)
    assert at("node7").own_address() == OwnAddress(name="node7", interface="")
    assert at("node7").store_interface() == ""
    assert at("node7", local_world_size=2).store_interface() == "127.0.1.1"
    with Leader(at("node7"), info()) as leader:
        assert leader._listener.getsockname()[0] == "0.0.0.0"


def test_sockets_listen_on_the_interface_of_the_network_only(network_address):
    assert at(network_address).own_address() == OwnAddress(name=network_address, interface=network_address)
    elsewhere = network_address.rpartition(".")[0] + (
        ".253" if not network_address.endswith(".253") else ".252"
    )
    assert at(elsewhere).own_address() == OwnAddress(name=network_address, interface=network_address)
    assert at(elsewhere).store_interface() == ""  # rank 0 hosts the store, behind another machine's address
    with Leader(at(network_address), info()) as leader:
        assert leader._listener.getsockname()[0] == network_address
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, leader.address.port), 5)


def listening():
    """Address and port of each socket on which this process listens."""
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.system
@pytest.mark.parametrize("of_agent", [True, False])
def test_sockets_of_a_rendezvous_listen_on_the_jobs_interface_only(agent, workers, of_agent):
    """Sockets of the leader, of the new store, and of the launcher's store if rank 0 hosts it."""
    port = agent.port
    if not of_agent:
        port = free_port()
    before = listening()
    seen = set()
    groups = start(workers, lambda rank, size: at(LOOPBACK, rank, size, port, of_agent), 3)
    while not all(each.done() for each in groups):
        seen |= listening() - before
    check(groups)
    assert {ip for ip, _ in seen} == {LOOPBACK}


def test_unresolvable_address_is_named():
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no\.such\.host\.invalid'"):
        at("no.such.host.invalid").own_address()
