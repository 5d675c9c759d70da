"""Discovery of the leader, which publishes its address in the launcher's store.

Under torchrun this is the agent's store, which survives generations of workers: the address may belong to a
dead leader, so only a connection to it proves anything. All access to the store is in a background thread,
since torch's store has calls that a frozen peer could block for ever.
"""

import json
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.rendezvous.launcher_env import LauncherEnv, OwnAddress
from cpr.rendezvous.stores import connect, serve

POLL_S: Final = 0.02
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
