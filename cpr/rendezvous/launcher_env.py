"""The environment that a launcher gives a worker, and the address of this machine for other workers."""

import os
import socket
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from typing import Final, Self

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class OwnAddress:
    """Address at which other workers reach this machine."""

    name: str
    """Host name or address."""
    interface: str
    """Address of the network interface to listen on; empty: all interfaces."""


@dataclass(frozen=True, kw_only=True)
class LauncherEnv:
    """Environment of a worker under torchrun, or under another launcher with `env://` variables."""

    rank: int
    world_size: int
    address: str
    """Address of the store that all workers of this launch can reach."""
    port: int
    of_agent: bool
    """Whether the agent hosts that store for all generations of workers; otherwise rank 0 hosts it."""
    local_rank: int = 0
    local_world_size: int = 1
    """Workers of this node; 1 if not known."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read the environment; None without a launcher.

        Raises:
            ValueError: variables are missing, or are not numbers.
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
        """Address at which the other workers reach this machine, limited to the job's network.

        If all workers are on one machine, this is the loopback interface; on the machine of the store, the
        name of the store, which the others use already; elsewhere, the interface with the route to the store.

        Raises:
            ValueError: there is no route to the store.
        """
        if self._is_one_machine:
            return OwnAddress(name=LOOPBACK, interface=LOOPBACK)
        here, there = self._route
        if here == there or _is_loopback(here):
            return OwnAddress(name=self.address, interface=self.store_interface())
        return OwnAddress(name=here, interface=here)

    def store_interface(self) -> str:
        """Address of the interface on which a store of this process must listen to be found at `address`.

        Empty (all interfaces) if others may reach it by another one: a name that resolves to loopback here,
        as in Debian's hosts file, resolves to a network address elsewhere.

        Raises:
            ValueError: there is no route to `address`.
        """
        here, there = self._route
        if _is_loopback(here):
            is_everywhere = self.address == "localhost" or _is_loopback(self.address)
            return there if is_everywhere or self._is_one_machine else ""
        return there if here == there else ""

    @property
    def _is_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    @cached_property
    def _route(self) -> tuple[str, str]:
        """Source and target addresses of the route from this machine to the store."""
        try:
            family, _, _, _, there = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # UDP: sends nothing, only asks the kernel for the route
                return str(probe.getsockname()[0]), str(there[0])
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR is {self.address!r}, to which there is no route: {error}"
            ) from error


def _is_loopback(address: str) -> bool:
    """Whether this is a loopback address; names are not resolved."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
