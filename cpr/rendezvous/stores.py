"""Creation of torch's stores without slow name look-ups and without pages of stack traces."""

import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.rendezvous.launcher_env import OwnAddress

CONNECT_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 1024


def listen(own: OwnAddress, port: int = 0) -> socket.socket:
    """A listening socket, limited to the job's network interface if that is known.

    Args:
        own: address of this machine.
        port: 0: a free one.

    Raises:
        OSError: the port is taken.
    """
    # Torch looks up the name of each client in the store's only thread. On a socket for both versions of IP,
    # the hosts file does not contain even this machine, and a slow name server would delay all clients.
    place = own.interface or own.name
    family, _, _, _, where = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where if own.interface else ("", port), family=family, backlog=_BACKLOG)


def serve(own: OwnAddress, timeout: timedelta, port: int = 0) -> TCPStore:
    """Host a new store in this process, open to all processes that reach it, as torch's stores have no key.

    Args:
        own: address of this machine.
        timeout: of the store's calls.
        port: 0: a free one.

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


def connect(address: str, port: int, timeout: timedelta, *, probe: bool) -> TCPStore:
    """Connect to a store.

    Args:
        address: of the store's machine.
        port: of the store.
        timeout: of the store's calls.
        probe: whether to make a plain connection first, as the store may be gone: torch itself would take
            long to notice, and print pages of stack traces.

    Raises:
        OSError: no process answers.
        RuntimeError: the process that answers is not a store.
    """
    # The probe stays open until the store's connection is made: a connection that ends before the store has
    # accepted it has no address, and torch would look up an empty name.
    probing = socket.create_connection((address, port), CONNECT_TIMEOUT_S) if probe else nullcontext()
    with probing:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
