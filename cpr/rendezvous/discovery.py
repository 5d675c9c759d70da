"""The bulletin board: the one place that all workers of a launch know, where the host says how to reach it.

Under torchrun it is the agent's store, which outlives generations: what is read there may be an
announcement of a worker long dead, and nothing but the place to knock is taken from it. All talk with
the board is in a thread of its own, since torch's store has calls that a frozen peer could hold for ever.
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
"""More than the 5 s for which a lost answer of a name server holds up torch's store."""
_KEY: Final = "cpr/rendezvous/leader"


@dataclass(frozen=True, kw_only=True)
class LeaderAddress:
    """Where a host waits for the others."""

    address: str
    port: int
    nonce: str
    """Of this one meeting; the key that both ends of a connection show, see `messages`."""


class Discovery:
    """Reads the newest announcement over and over; posts this worker's own first, if it has one."""

    def __init__(self, place: LauncherEnv, own: LeaderAddress | None = None) -> None:
        self.latest: LeaderAddress | None = None
        self.problem: str | None = "it does not answer"
        """Why the board cannot be read at the moment."""
        self.store: TCPStore | None = None
        """The connection; where rank 0 keeps the board, it lives in this very object."""
        self._place, self._own = place, own
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpr-meeting-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading. A thread that a frozen peer holds is left to itself."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.store = self._open()
                if self._own:
                    self.store.set(_KEY, json.dumps(asdict(self._own)))
                self.problem = None
                self._read(self.store)
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                self._has_failed = True
                self.problem = str(error).split("\n", maxsplit=1)[0]
            self._closing.wait(POLL_S)

    def _read(self, store: TCPStore) -> None:
        while not self._closing.is_set():
            if store.check([_KEY]):
                self.latest = LeaderAddress(**json.loads(store.get(_KEY)))
            self._closing.wait(POLL_S)

    def _open(self) -> TCPStore:
        place = self._place
        if place.rank == 0 and not place.of_agent:
            own = OwnAddress(name=place.address, interface=place.store_interface())
            return serve(own, _CALL_TIMEOUT, place.port)
        # An agent's store is there before its workers are: not to knock first spares it a look-up of names.
        doubtful = self._has_failed or not place.of_agent
        return connect(place.address, place.port, _CALL_TIMEOUT, doubtful=doubtful)
