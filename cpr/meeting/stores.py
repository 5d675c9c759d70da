"""Torch's stores, made without what costs time or fills the screen."""

import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

CONNECT_TIMEOUT_S: Final = 2.0


def serve(address: str, timeout: timedelta, port: int = 0) -> TCPStore:
    """A new store in this process.

    Args:
        address: of this machine, as the others know it.
        timeout: of the store's calls.
        port: 0: one that is free.

    Raises:
        OSError: the port is taken.
    """
    # Torch looks up the name of everybody who connects, in the store's only thread. On a socket for both
    # versions of IP, even this machine is not in its hosts file, and a name server that is slow to answer
    # would hold up everybody.
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server(("", port), family=family, backlog=1024) as server:
        return TCPStore(
            address,
            server.getsockname()[1],
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def connect(address: str, port: int, timeout: timedelta, *, doubtful: bool) -> TCPStore:
    """A client of a store.

    Args:
        address: of the machine that it is on.
        port: of the store there.
        timeout: of the store's calls.
        doubtful: whether it may well be gone: torch itself would be long in noticing, with pages of stack
            traces.

    Raises:
        OSError: nobody answers.
        RuntimeError: it is no store that does.
    """
    # The first connection stays open until the second is made: one that ends before the store has taken it
    # has no address, and torch looks up the name of none.
    knock = socket.create_connection((address, port), CONNECT_TIMEOUT_S) if doubtful else nullcontext()
    with knock:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
