"""Nodes must reach each other at the addresses that gloo takes."""

import socket
from contextlib import contextmanager

import pytest
from torch.distributed import ProcessGroupGloo

from cpr.doctor import interfaces
from cpr.doctor.interfaces import GlooAddress, check_interfaces
from tests.cpr.doctor.nodes import run_nodes
from tests.cpr.rendezvous.workers import free_port


def check(num_nodes):
    return run_nodes(*num_nodes * [lambda meeting: list(check_interfaces(meeting))])


def test_nodes_that_reach_each_other_are_fine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for (found,) in check(3):
        assert found.state == "ok"
        assert "gloo takes 127.0.0.1 here (GLOO_SOCKET_IFNAME=lo); all nodes reach each other" in found.text


def test_a_missing_interface_is_told_on_all_nodes(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    addresses = [GlooAddress.of_this_node(), OSError("no card")]

    def one_after_the_other():
        address = addresses.pop()
        if isinstance(address, OSError):
            raise address
        return address

    monkeypatch.setattr(GlooAddress, "of_this_node", one_after_the_other)
    found = sorted(str(each) for (each,) in check(2))
    assert "interfaces: no card. What to do: name an interface of this node in GLOO_SOCKET_IFNAME" in found[0]
    assert "has no address for gloo: no card. What to do: name an interface of that node" in found[1]


def test_a_closed_port_is_told(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    @contextmanager
    def closed(own, nonce):
        yield free_port()

    monkeypatch.setattr(interfaces, "_answering", closed)
    for (found,) in check(2):
        assert found.state == "PROBLEM"
        assert "cannot be reached at 127.0.0.1:" in found.text
        assert "(GLOO_SOCKET_IFNAME=lo there): Connection refused. What to do: " in found.text
        assert "other machines cannot reach a loopback address" in found.text


def test_no_node_may_start_where_one_is_not_reached(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    reach, failures = interfaces._try_to_reach, ["cannot be reached at 192.0.2.7"]
    monkeypatch.setattr(interfaces, "_try_to_reach", lambda node: failures.pop() if failures else reach(node))
    found = check(3)
    assert [[each.state for each in node] for node in found] == 3 * [["PROBLEM"]]
    assert (
        sum("not all nodes reach each other. What to do: see what node" in str(node) for node in found) == 2
    )


def test_only_the_node_itself_may_answer(monkeypatch):
    # as where all nodes have a bridge of the same address, and each reaches its own
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answering = interfaces._answering
    monkeypatch.setattr(interfaces, "_answering", lambda own, nonce: answering(own, "of another program"))
    for (found,) in check(2):
        assert "another program answers" in found.text


def test_a_firewall_is_suspected_where_an_address_is_of_a_network():
    place = ("192.0.2.7", 1, "b resolves to it")
    assert interfaces._advice({"place": place}).startswith("open all TCP ports between the nodes")


@pytest.mark.parametrize(
    ("name", "host", "reason"),
    [
        ("lo", None, "GLOO_SOCKET_IFNAME=lo"),
        ("lo,eth7", None, "GLOO_SOCKET_IFNAME=lo,eth7"),
        ("", "localhost", "localhost resolves to it"),
        ("", "no.such.host.invalid", "no.such.host.invalid does not resolve to an address of this node"),
    ],
)
def test_the_address_is_chosen_as_gloo_does(monkeypatch, name, host, reason):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    if host:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
    found = GlooAddress.of_this_node()
    assert found.address in {"127.0.0.1", "::1"}
    assert found.reason == reason


def test_an_interface_that_gloo_refuses_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RuntimeError, match="eth7"):
        ProcessGroupGloo.create_device(interface="eth7")
    with pytest.raises(OSError, match=r"names eth7, which has no address here; there are .*lo"):
        GlooAddress.of_this_node()
