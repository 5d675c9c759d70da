"""Discovery of the leader, which publishes its address in the launcher's store.

Under torchrun this is the agent's store, which survives generations of workers: the address may belong to a
dead leader, so only a connection to it proves anything. All access to the store is in a background thread,
since torch's store has calls that a frozen peer could block for ever.

Stores are made here, too, without slow name look-ups and without pages of stack traces.
"""

import json
import socket
import threading
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.rendezvous.launcher_env import LauncherEnv, OwnAddress

POLL_S: Final = 0.02
CONNECT_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 1024
_CLOSE_TIMEOUT_S: Final = 1.0
_CALL_TIMEOUT: Final = timedelta(seconds=10)
"""More than the 5 s for which a lost answer of a name server delays torch's store."""
_KEY: Final = "cpr/rendezvous/leader"


@dataclass(frozen=True, kw_only=True)
class LeaderAddress:
    """Address at which a leader waits for clients."""

    address: str
    port: int
    nonce: str
    """Key of this one rendezvous, which both ends of a connection have to know, see `messages`."""


class Discovery:
    """Publishes this worker's own address, if it has one, and polls for the newest address."""

    def __init__(self, env: LauncherEnv, own: LeaderAddress | None = None) -> None:
        self.latest: LeaderAddress | None = None
        self.problem: str | None = "it does not answer"
        """Why the store cannot be read at present."""
        self.store: TCPStore | None = None
        """The connection; where rank 0 hosts the launcher's store, this object is the store."""
        self._env, self._own = env, own
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpr-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling; a thread blocked by a frozen peer is abandoned."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.store = self._open()
                if self._own:  # again after each reconnection, as a restarted store is empty
                    self.store.set(_KEY, json.dumps(asdict(self._own)))
                self.problem = None
                self._poll(self.store)
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                self._has_failed = True
                self.problem = str(error).split("\n", maxsplit=1)[0]
            self._closing.wait(POLL_S)

    def _poll(self, store: TCPStore) -> None:
        while not self._closing.is_set():
            if store.check([_KEY]):
                self.latest = LeaderAddress(**json.loads(store.get(_KEY)))
            self._closing.wait(POLL_S)

    def _open(self) -> TCPStore:
        env = self._env
        if env.rank == 0 and not env.of_agent:
            own = OwnAddress(name=env.address, interface=env.store_interface())
            return serve(own, _CALL_TIMEOUT, env.port)
        # an agent's store exists before its workers: without a probe, one look-up of its name is saved
        probe = self._has_failed or not env.of_agent
        return connect(env.address, env.port, _CALL_TIMEOUT, probe=probe)


def listen(own: OwnAddress, port: int = 0) -> socket.socket:
    """A listening socket, limited to the job's network interface if that is known; port 0: a free one.

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
    """Connect to a store, with a plain connection as a `probe` first where the store may be gone.

    Torch itself would take long to notice that, and print pages of stack traces.

    Raises:
        OSError: no process answers.
        RuntimeError: the process that answers is not a store.
    """
    # The probe stays open until the store's connection is made: a connection that ends before the store has
    # accepted it has no address, and torch would look up an empty name.
    probing = socket.create_connection((address, port), CONNECT_TIMEOUT_S) if probe else nullcontext()
    with probing:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
