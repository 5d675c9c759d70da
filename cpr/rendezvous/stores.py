"""Torch's stores, made without what costs time or fills the screen."""

import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.rendezvous.launcher_env import OwnAddress

CONNECT_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 1024


def listen(own: OwnAddress, port: int = 0) -> socket.socket:
    """A socket for connections to this machine, on the job's network interface alone where that is known.

    Args:
        own: of this machine.
        port: 0: one that is free.

    Raises:
        OSError: the port is taken.
    """
    # Torch looks up the name of everybody who connects, in the store's only thread. On a socket for both
    # versions of IP, even this machine is not in its hosts file, and a name server that is slow to answer
    # would hold up everybody.
    place = own.interface or own.name
    family, _, _, _, where = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where if own.interface else ("", port), family=family, backlog=_BACKLOG)


def serve(own: OwnAddress, timeout: timedelta, port: int = 0) -> TCPStore:
    """A new store in this process, which anyone can use who reaches it: torch's stores ask for no key.

    Args:
        own: of this machine.
        timeout: of the store's calls.
        port: 0: one that is free.

    Raises:
        OSError: the port is taken.
    """
    with listen(own, port) as server:
        return TCPStore(
            own.name,
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
