"""Where the launcher put this worker, and what it calls itself to others."""

import os
import socket
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Place:
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

    def own_address(self) -> str:
        """By which the other workers reach this machine.

        On the machine of the store that is the name of the store itself, which the others use already;
        elsewhere the address of the interface that leads to it.

        Raises:
            ValueError: there is no way to the store.
        """
        try:
            family, _, _, _, there = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # sends nothing: only asks the kernel for the way
                here = str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(f"MASTER_ADDR is {self.address!r}, to which there is no way: {error}") from error
        is_same_machine = here == there[0] or here == "::1" or here.startswith("127.")
        return self.address if is_same_machine else here
