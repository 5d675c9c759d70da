"""The host of a meeting: rank 0 of the launcher, who waits for an offer of every other rank.

An offer counts as long as the connection that brought it is open, so nothing that a dead worker left can
take part in a decision: there are no keys that could be stale. Those who connect and do not show at once that
they know the nonce are strangers, of whom few are let in, and none for long.
"""

import selectors
import time
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from cpr.rendezvous.discovery import POLL_S, LeaderAddress
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.messages import Connection, LostError
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo
from cpr.rendezvous.stores import listen

NEWS_INTERVAL_S: Final = 0.2
"""How often, at most, guests are told who is missing."""
_MAX_STRANGERS: Final = 256
"""At once; one more, and the first of them has to go. Workers show the key as they come."""
_STRANGER_S: Final = 5.0
"""How long one may stay."""


class Leader:
    """Listens from the start; a context manager that hangs up on everybody in the end."""

    def __init__(self, place: LauncherEnv, info: WorkerInfo) -> None:
        self._place, self._offer = place, info
        self.own = place.own_address()
        self._listener = listen(self.own)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[int, tuple[Connection, WorkerInfo]] = {}
        self._strangers: dict[Connection, float] = {}
        """When each came; the first one first."""
        self._told: list[int] = []
        self._told_at = 0.0
        self.announcement = LeaderAddress(
            address=self.own.name, port=self._listener.getsockname()[1], nonce=uuid4().hex
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # sockets, all of them
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """The launcher's ranks that are not here."""
        return [rank for rank in range(1, self._place.world_size) if rank not in self._guests]

    def gather(self, deadline: float) -> list[WorkerInfo] | None:
        """The offers of all, in the order of the launcher's ranks; None if not all came by `deadline`.

        Args:
            deadline: as `time.monotonic` has it.
        """
        while self.missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            for key, _ in self._selector.select(min(POLL_S, left_s)):
                if key.data is None:
                    self._let_in()
                else:
                    self._hear(key.data)
            self._turn_strangers_away()
            self._tell_who_is_missing()
        return [self._offer, *(self._guests[rank][1] for rank in range(1, self._place.world_size))]

    def tell(self, decision: Assignment, infos: list[WorkerInfo], store_port: int) -> None:
        """Tell all guests. One that is lost by now will be missed in the process group, and restarted."""
        message = {
            "decision": asdict(decision),
            "offers": [info.to_json() for info in infos],
            "store_port": store_port,
        }
        for connection, _ in self._guests.values():
            with suppress(LostError):
                connection.send(message)

    def _let_in(self) -> None:
        with suppress(OSError):  # gone before we looked
            sock, _ = self._listener.accept()
            connection = Connection(sock, self.announcement.nonce, is_host=True)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._strangers[connection] = time.monotonic()

    def _hear(self, connection: Connection) -> None:
        if connection.is_closed:  # by what another, who was heard just before, has said
            return
        try:
            for message in connection.read():
                self._seat(connection, message)
            if connection.is_trusted:
                self._strangers.pop(connection, None)
        except LostError:
            self._hang_up(connection)

    def _seat(self, connection: Connection, message: dict[str, Any]) -> None:
        try:
            rank, info = int(message["rank"]), WorkerInfo.from_json(message["offer"])
            fits = message["world_size"] == self._place.world_size and 0 < rank < self._place.world_size
        except (KeyError, TypeError, ValueError) as error:
            raise LostError("no offer") from error
        if not fits:
            raise LostError("a worker of another launch")
        if rank in self._guests:  # its agent was replaced, and the old worker still lives
            before, _ = self._guests[rank]
            with suppress(LostError):
                before.send({"displaced": True})
            self._hang_up(before)
        self._guests[rank] = connection, info

    def _hang_up(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        self._strangers.pop(connection, None)
        connection.close()
        for rank, (guest, _) in list(self._guests.items()):
            if guest is connection:
                del self._guests[rank]

    def _turn_strangers_away(self) -> None:
        now = time.monotonic()
        for connection, came_at in list(self._strangers.items()):
            if len(self._strangers) <= _MAX_STRANGERS and now < came_at + _STRANGER_S:
                return
            self._hang_up(connection)

    def _tell_who_is_missing(self) -> None:
        missing, now = self.missing, time.monotonic()
        if missing == self._told or now < self._told_at + NEWS_INTERVAL_S:
            return
        self._told, self._told_at = missing, now
        for connection, _ in list(self._guests.values()):
            try:
                connection.send({"missing": missing})
            except LostError:
                self._hang_up(connection)
