"""Links of a chosen speed on one machine: a network namespace for each node, and a bridge between them.

Every node sees one network card, whose other end is a port of a bridge in a namespace of its own.
Linux's token bucket filter (`tc tbf`) limits the speed of both ends, so that what leaves a node and what
reaches it take their time. The workers of a node share its card; what they send each other does not pass it,
and is as fast as this machine can. Interfaces live inside the namespaces alone and vanish with them; the
namespaces are named by the process that made them, and those of a process that is no more are removed by
the next.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "cpr-net"
PORT: Final = 29500
"""Port of the rendezvous, in the namespace of the first node."""
LINK: Final = "card"
"""A node's network card, in its namespace."""
TCP: Final = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""TCP settings that each node gets, since defaults differ between systems, and a namespace may not offer all
congestion controls. Without slow start after idle, a link is as fast after a pause as before it."""
MOST_QUEUED_BYTES: Final = 64_000_000
"""Most bytes that may wait before a link; senders have fewer on their way, so that nothing is dropped."""
LEAST_BURST_BYTES: Final = 72_000
"""Fewest bytes that a link lets pass at once: enough for the largest packet that Linux hands to a card."""
BURST_S: Final = 100e-6
"""On fast links what passes at once is this long, since a timer has to let it through."""


class NoNetworkError(OSError):
    """This machine or user cannot have links of their own; the message says what is missing."""


def check_possible() -> None:
    """Refuse to begin where it cannot work.

    Raises:
        NoNetworkError: not root, a command is missing, or the system does not allow it.
    """
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise NoNetworkError(f"links with a limited speed need {' and '.join(missing)}: install iproute2")
    if os.geteuid() != 0:
        raise NoNetworkError("links with a limited speed take network namespaces, and those take root")
    with Network(1) as network:
        network.limit(1.0)


class Network:
    """Workers in nodes that each have a link to all others, of any speed until it is limited.

    Links can be cut, too (`link`).

    Args:
        num_workers: how many.
        per_node: workers of a node, by rank one after the other; it divides `num_workers`.

    Raises:
        ValueError: it does not.
    """

    def __init__(self, num_workers: int, per_node: int = 1) -> None:
        if per_node < 1 or num_workers % per_node:
            raise ValueError(f"{num_workers} workers cannot be dealt out to nodes of {per_node}")
        self.num_workers: Final = num_workers
        self._per_node: Final = per_node
        self._hub = f"{PREFIX}-{os.getpid()}-hub"
        self._names = [f"{PREFIX}-{os.getpid()}-{node}" for node in range(num_workers // per_node)]

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all of it."""
        for name in self.left():
            _run("ip", "netns", "del", name)

    def left(self) -> list[str]:
        """Its namespaces that are there; none after its end."""
        return sorted({self._hub, *self._names} & set(_namespaces()))

    def command(self, worker: int) -> list[str]:
        """What comes before a command line that is to run as that worker."""
        return ["ip", "netns", "exec", self._names[worker // self._per_node]]

    def environment(self, worker: int) -> dict[str, str]:
        """Environment variables for `init_process_group` in that worker: torchrun's, and Gloo's card."""
        told = rank_environment(worker, self.num_workers, self._per_node, _address(0), PORT)
        return told | {"GLOO_SOCKET_IFNAME": LINK}

    def address(self, worker: int) -> str:
        """IP address by which all other workers reach that worker."""
        return _address(worker // self._per_node)

    def link(self, worker: int) -> "CableToHub":
        """Link that connects that worker's node to all others."""
        return CableToHub(self._hub, _port(worker // self._per_node))

    def limit(self, gbit_per_s: float | None) -> None:
        """All links have this speed from now on, each way; None: as fast as this machine can."""
        ends = [(name, LINK) for name in self._names]
        ends += [(self._hub, _port(node)) for node in range(len(self._names))]
        for namespace, device in ends:
            self._limit_end(namespace, device, gbit_per_s)

    def _limit_end(self, namespace: str, device: str, gbit_per_s: float | None) -> None:
        on_device = ["dev", device, "root"]
        if gbit_per_s is None:
            if "tbf" in _run("tc", "-n", namespace, "qdisc", "show", "dev", device):
                _run("tc", "-n", namespace, "qdisc", "del", *on_device)
            return
        bytes_per_s = gbit_per_s * 1e9 / 8
        burst = max(LEAST_BURST_BYTES, int(bytes_per_s * BURST_S))
        speed = ["rate", f"{int(gbit_per_s * 1e9)}bit", "burst", str(burst), "limit", str(MOST_QUEUED_BYTES)]
        _run("tc", "-n", namespace, "qdisc", "replace", *on_device, "tbf", *speed)

    def _use_plain_tcp(self, name: str) -> None:
        for setting, value in TCP.items():
            path = f"/proc/sys/net/ipv4/{setting}"
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > {path}")

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "hub", "up")
        for node, name in enumerate(self._names):
            port = _port(node)
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", self._hub]
            _run("ip", "-n", name, "link", "add", LINK, "type", "veth", *peer)
            _run("ip", "-n", self._hub, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "address", "add", f"{_address(node)}/24", "dev", LINK)
            self._use_plain_tcp(name)
            for device in ("lo", LINK):
                _run("ip", "-n", name, "link", "set", device, "up")


@dataclass(frozen=True)
class CableToHub:
    """A node's link, to cut and heal (see `cpr.faults.NetworkLink`).

    While it is cut, both ends stay up, and what is sent is lost without a word, as by a broken switch.
    """

    hub: str
    port: str

    def cut(self) -> None:
        """Nothing passes any more.

        Raises:
            NoNetworkError: the network is no longer there.
        """
        _run("ip", "-n", self.hub, "link", "set", self.port, "nomaster")

    def heal(self) -> None:
        """All passes again.

        Raises:
            NoNetworkError: the network is no longer there.
        """
        _run("ip", "-n", self.hub, "link", "set", self.port, "master", "hub")


def rank_environment(worker: int, num_workers: int, per_node: int, host: str, port: int) -> dict[str, str]:
    """The environment variables by which torchrun gives a worker its ranks and the rendezvous."""
    node, place = divmod(worker, per_node)
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(worker),
        "LOCAL_RANK": str(place),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


def sent_bytes() -> int:
    """Bytes that this process's node has sent over its link so far, headers and repeats included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            return int(numbers.split()[8])
    raise NoNetworkError(f"this process has no {LINK}: it was not started in a Network")


def remove_leftovers() -> None:
    """End what still runs in namespaces of processes that are no more, and remove them."""
    for name in _namespaces():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        for pid in _run("ip", "netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _port(node: int) -> str:
    return f"port{node}"


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def leave_tidily() -> None:
    """Have SIGTERM end this process as an exception, so that namespaces are removed; another is ignored."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
