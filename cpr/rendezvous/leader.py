"""Leader side of a rendezvous: the launcher's rank 0, which waits for the infos of all other ranks.

An info counts as long as its connection is open, so nothing of a dead worker can take part: there are no keys
that could be stale. A connection that has not proven yet that it knows the nonce is a stranger; the number of
strangers and their time are limited.
"""

import selectors
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Self
from uuid import uuid4

from cpr.rendezvous.discovery import POLL_S, LeaderAddress, listen
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.messages import Connection, LostError
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo

NEWS_INTERVAL_S: Final = 0.2
"""Shortest time between two messages on missing ranks to the clients."""
_MAX_STRANGERS: Final = 256
"""Strangers at the same time; one more, and the first is disconnected. Clients prove the key at once."""
_STRANGER_S: Final = 5.0
"""Longest time without a proof."""


class Leader:
    """Listens from its creation on; a context manager that closes all connections at the end."""

    def __init__(self, env: LauncherEnv, info: WorkerInfo) -> None:
        self._env, self._info = env, info
        self.own = env.own_address()
        self._listener = listen(self.own)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[int, tuple[Connection, WorkerInfo]] = {}
        self._seen: set[int] = set()
        self._strangers: dict[Connection, float] = {}
        """With the time of the connection; the oldest first."""
        self._reported: list[int] = []
        self._reported_at = 0.0
        self.address = LeaderAddress(
            address=self.own.name, port=self._listener.getsockname()[1], nonce=uuid4().hex
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """The launcher's ranks that have not joined."""
        return [rank for rank in range(1, self._env.world_size) if rank not in self._clients]

    @property
    def absent(self) -> list[int]:
        """The missing ranks that never joined, or, if all have, those that have left again."""
        return [rank for rank in self.missing if rank not in self._seen] or self.missing

    def gather(self, deadline: float) -> list[WorkerInfo] | None:
        """Wait until `deadline` (`time.monotonic`) for all clients.

        Returns:
            The infos of all workers in the order of the launcher's ranks; None if some did not come in time.
        """
        while self.missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            for key, _ in self._selector.select(min(POLL_S, left_s)):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            self._drop_strangers()
            self._report_missing()
        return [self._info, *(self._clients[rank][1] for rank in range(1, self._env.world_size))]

    def send_assignment(self, assignment: Assignment, infos: list[WorkerInfo], store_port: int) -> None:
        """Send the assignment to all clients. A client lost by now will be missed in the process group."""
        message = {
            "assignment": asdict(assignment),
            "infos": [asdict(info) for info in infos],
            "store_port": store_port,
        }
        for connection, _ in self._clients.values():
            with suppress(LostError):
                connection.send(message)

    def _accept(self) -> None:
        with suppress(OSError):  # closed by the peer in the meantime
            sock, _ = self._listener.accept()
            connection = Connection(sock, self.address.nonce, is_leader=True)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._strangers[connection] = time.monotonic()

    def _receive(self, connection: Connection) -> None:
        if connection.is_closed:  # displaced by a message handled just before
            return
        try:
            for message in connection.read():
                self._add_client(connection, message)
            if connection.is_trusted:
                self._strangers.pop(connection, None)
        except LostError:
            self._disconnect(connection)

    def _add_client(self, connection: Connection, message: dict[str, Any]) -> None:
        try:
            rank, info = int(message["rank"]), WorkerInfo.from_json(message["info"])
            fits = message["world_size"] == self._env.world_size and 0 < rank < self._env.world_size
        except (KeyError, TypeError, ValueError) as error:
            raise LostError("not a worker's info") from error
        if not fits:
            raise LostError("a worker of another launch")
        # two live processes may claim one rank: the newer connection wins
        if rank in self._clients:  # its agent was replaced, and the old worker is still alive
            before, _ = self._clients[rank]
            with suppress(LostError):
                before.send({"displaced": True})
            self._disconnect(before)
        self._clients[rank] = connection, info
        self._seen.add(rank)

    def _disconnect(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        self._strangers.pop(connection, None)
        connection.close()
        self._clients = {rank: entry for rank, entry in self._clients.items() if entry[0] is not connection}

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        for connection, came_at in list(self._strangers.items()):
            if len(self._strangers) <= _MAX_STRANGERS and now < came_at + _STRANGER_S:
                return
            self._disconnect(connection)

    def _report_missing(self) -> None:
        missing, now = self.missing, time.monotonic()
        if missing == self._reported or now < self._reported_at + NEWS_INTERVAL_S:
            return
        self._reported, self._reported_at = missing, now
        for connection, _ in list(self._clients.values()):
            try:
                connection.send({"missing": missing})
            except LostError:
                self._disconnect(connection)
