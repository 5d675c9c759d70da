"""Check that all nodes reach each other at the addresses that gloo takes, by plain connections.

Gloo itself would take 100 s to notice that it cannot connect, and does not say to which node.
"""

import fcntl
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, Self

from cpr.doctor.finding import Finding, problem
from cpr.doctor.meeting import Meeting
from cpr.rendezvous.launcher_env import LOOPBACK

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
CONNECT_TIMEOUT_S: Final = 5.0
_MOST_THREADS: Final = 32
_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPE: Final = "00"


@dataclass(frozen=True, kw_only=True)
class GlooAddress:
    """Address on which gloo listens on this node."""

    address: str
    reason: str
    """Why gloo takes it."""

    @classmethod
    def of_this_node(cls) -> Self:
        """Choose as gloo does: `GLOO_SOCKET_IFNAME`, or what the host name resolves to, or else loopback.

        Raises:
            OSError: no such interface, or it has no address.
        """
        if names := os.environ.get(VARIABLE):
            return cls(address=_address_of(names.split(",")[0]), reason=f"{VARIABLE}={names}")
        host = socket.gethostname()
        with suppress(OSError):
            for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(family, kind) as trial:
                    trial.bind(where)
                    return cls(address=str(where[0]), reason=f"{host} resolves to it")
        return cls(address=LOOPBACK, reason=f"{host} does not resolve to an address of this node")


def check_interfaces(meeting: Meeting) -> Iterator[Finding]:
    """Connect to all other nodes.

    Yields:
        A problem for each node that cannot be reached; on a node that reaches all others, a problem if one of
        them does not, as gloo connects all with all; otherwise, that all nodes reach each other.

    Raises:
        RendezvousError: a node has ended.
    """
    nonce, own, wrong = secrets.token_hex(8), None, None
    try:
        own = GlooAddress.of_this_node()
    except OSError as error:
        wrong = str(error)
    with _answering(own, nonce) as port:
        place = None if own is None else (own.address, port, own.reason)
        nodes = meeting.gather("address for gloo", {"place": place, "nonce": nonce, "wrong": wrong})
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            tried = list(pool.map(lambda rank: _try_to_reach(nodes[rank]), meeting.others))
        failures = {rank: failure for rank, failure in zip(meeting.others, tried, strict=True) if failure}
        all_failures = meeting.gather("list of nodes that it reaches", sorted(failures))
    for rank, failure in failures.items():
        yield problem("interfaces", f"{meeting.name(rank)} {failure}", _advice(nodes[rank]))
    if wrong is not None:
        yield problem("interfaces", wrong, f"name an interface of this node in {VARIABLE} (`ip -br addr`)")
    elif own is not None and not failures:
        elsewhere = ", ".join(meeting.name(rank) for rank, found in enumerate(all_failures) if found)
        text = f"gloo takes {own.address} here ({own.reason}); "
        if elsewhere:
            yield problem("interfaces", f"{text}not all nodes reach each other", f"see what {elsewhere} says")
        else:
            yield Finding("interfaces", f"{text}all nodes reach each other")


def _address_of(interface: str) -> str:
    """First address of a network interface, IPv4 before IPv6; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if (name, scope) == (interface, _GLOBAL_SCOPE):
                return str(IPv6Address(int(address, 16)))
    there = ", ".join(name for _, name in socket.if_nameindex())
    raise OSError(f"{VARIABLE} names {interface}, which has no address here; there are {there}")


@contextmanager
def _answering(own: GlooAddress | None, nonce: str) -> Iterator[int]:
    """Answer connections with a nonce; gives the port, 0 without an address."""
    if own is None:
        yield 0
        return
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET

    def answer() -> None:
        with suppress(OSError):  # at the end, no more connections are accepted
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    connection.sendall(nonce.encode())

    with socket.create_server((own.address, 0), family=family) as server:
        thread = threading.Thread(target=answer, name="doctor-interfaces", daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _try_to_reach(node: dict[str, Any]) -> str:
    """Why a node cannot be reached; empty if it can."""
    if node["place"] is None:
        return f"has no address for gloo: {node['wrong']}"
    address, port, reason = node["place"]
    where = f"cannot be reached at {address}:{port} ({reason} there)"
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT_S) as connection:
            with connection.makefile() as answer:
                if answer.read() == node["nonce"]:
                    return ""
            return f"{where}: another program answers"
    except OSError as error:
        return f"{where}: {error.strerror or error}"


def _advice(node: dict[str, Any]) -> str:
    if node["place"] is None:
        return f"name an interface of that node in {VARIABLE} there (`ip -br addr`)"
    on_node = f"on that node, name the interface of the job's network in {VARIABLE} (`ip -br addr`)"
    if ip_address(node["place"][0]).is_loopback:
        return f"{on_node}: other machines cannot reach a loopback address"
    return f"open all TCP ports between the nodes in their firewalls; or, {on_node}"
