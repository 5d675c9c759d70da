"""Where the launcher put this worker, and what it calls itself to others."""

import os
import socket
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from typing import Final, Self

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class OwnAddress:
    """By which the other workers reach this machine."""

    name: str
    """What they are told; a name or an address."""
    interface: str
    """Address of the network interface to listen on; empty: all of them."""


@dataclass(frozen=True, kw_only=True)
class LauncherEnv:
    """What torchrun, or another launcher that speaks `env://`, tells a worker."""

    rank: int
    world_size: int
    address: str
    """Of the store that all workers of this launch can reach."""
    port: int
    of_agent: bool
    """Whether the agent keeps that store, for all generations of workers; if not, rank 0 does."""
    local_rank: int = 0
    local_world_size: int = 1
    """Workers of this node; 1, as if each had a node of its own, where the launcher does not say."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """None if nothing launched this process together with others.

        Raises:
            ValueError: some of the variables are there, and others are not, or are no numbers.
        """
        if "MASTER_ADDR" not in os.environ:
            return None
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        try:
            return cls(
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                address=os.environ["MASTER_ADDR"],
                port=int(os.environ["MASTER_PORT"]),
                of_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
                local_rank=int(os.environ.get("LOCAL_RANK", "0")) if local_world_size > 1 else 0,
                local_world_size=local_world_size,
            )
        except KeyError as error:
            raise ValueError(
                f"MASTER_ADDR is set, but {error.args[0]} is not: start workers by torchrun"
            ) from error

    def own_address(self) -> OwnAddress:
        """By which the other workers reach this machine, on the network of the job alone.

        Where all workers are on one machine, that is the loopback interface. On the machine of the store it
        is the name of the store itself, which the others use already; elsewhere the address of the interface
        that leads to it.

        Raises:
            ValueError: there is no way to the store.
        """
        if self._is_one_machine:
            return OwnAddress(name=LOOPBACK, interface=LOOPBACK)
        here, there = self._way
        if here == there or _is_loopback(here):
            return OwnAddress(name=self.address, interface=self.store_interface())
        return OwnAddress(name=here, interface=here)

    def store_interface(self) -> str:
        """Address of the interface where a store of this process listens, for `address` to lead to it.

        Empty, which means all interfaces, where others may reach it by another one: a name that leads to the
        loopback interface here, as in Debian's hosts file, leads to a network elsewhere.

        Raises:
            ValueError: there is no way to `address`.
        """
        here, there = self._way
        if _is_loopback(here):
            is_everywhere = self.address == "localhost" or _is_loopback(self.address)
            return there if is_everywhere or self._is_one_machine else ""
        return there if here == there else ""

    @property
    def _is_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    @cached_property
    def _way(self) -> tuple[str, str]:
        """Addresses of this machine and of the store's, on the way from here to there."""
        try:
            family, _, _, _, there = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # sends nothing: only asks the kernel for the way
                return str(probe.getsockname()[0]), str(there[0])
        except OSError as error:
            raise ValueError(f"MASTER_ADDR is {self.address!r}, to which there is no way: {error}") from error


def _is_loopback(address: str) -> bool:
    """Of an address; no name is one."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
