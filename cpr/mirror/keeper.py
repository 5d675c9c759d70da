"""The keeper of mirrors: receives the rows of other workers into this worker's memory, in threads."""

import logging
import secrets
import socket
import threading
from contextlib import suppress
from typing import Final

from torch import Tensor

from cpr.errors import NotEnoughMemoryError
from cpr.mirror.copy import MirrorCopy, Moment, Owner
from cpr.mirror.link import (
    CHUNK_BYTES,
    EMPTY,
    MOMENT,
    PATIENCE_S,
    ROWS,
    KeeperAddress,
    LinkLostError,
    prove,
    receive,
    receive_into,
    receive_text,
    receive_words,
    send_text,
)
from cpr.rendezvous.discovery import listen
from cpr.rendezvous.launcher_env import OwnAddress
from cpr.resident.home import Home

MOST_CONNECTIONS: Final = 64
"""Connections at the same time; strangers beyond that are turned away."""

logger = logging.getLogger(__name__)


class Keeper:
    """Keeps the mirrors that owners send, from its creation until `close`.

    Args:
        home: folder of the run's memory on this machine.
        own: address at which the other nodes reach this one; it listens on this interface alone.
        session_id: owners of other sessions are refused.
    """

    def __init__(self, home: Home, own: OwnAddress, session_id: str) -> None:
        self._home, self._session_id = home, session_id
        self._listener = listen(own)
        self.address = KeeperAddress(
            address=own.name, port=self._listener.getsockname()[1], key=secrets.token_hex(16)
        )
        self._copies: dict[int, MirrorCopy] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._by_owner: dict[int, socket.socket] = {}
        self._alone = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="cpr-mirror-keeper", daemon=True)
        self._thread.start()

    def close(self, *, remove: bool) -> None:
        """End all connections; `remove`: free the mirrors too, instead of leaving them to a successor."""
        self._is_closed = True
        _end(self._listener)
        self._thread.join()
        for sock, thread in list(self._connections.items()):
            _end(sock)
            thread.join()
        if remove:
            for copy in self._copies.values():
                copy.remove()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                continue
            if len(self._connections) >= MOST_CONNECTIONS or self._is_closed:
                sock.close()
                continue
            thread = threading.Thread(target=self._serve, args=[sock], name="cpr-mirror-copy", daemon=True)
            self._connections[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(PATIENCE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove(sock, self.address.key, is_keeper=True)
                copy = self._admit(sock)
                sock.settimeout(None)  # an owner may compute for long
                while copy is not None:
                    copy = self._take(sock, copy)
        except NotEnoughMemoryError:
            pass  # the owner was told, and tries again
        except (OSError, ValueError, TypeError, LookupError) as error:
            if not self._is_closed and not isinstance(error, (LinkLostError, ConnectionError)):
                logger.warning("the connection of a mirror's owner has ended: %s", error)
        finally:
            self._connections.pop(sock, None)

    def _admit(self, sock: socket.socket) -> MirrorCopy | None:
        """Make memory for an owner, or find it if the owner connects again; None if there is no room."""
        owner = Owner.from_json(receive_text(sock))
        if owner.session_id != self._session_id:
            raise ValueError("an owner of another session")
        with self._alone:
            self._displace(owner.rank)
            self._by_owner[owner.rank] = sock
            problem = ""
            try:
                if owner.rank not in self._copies:
                    self._copies[owner.rank] = MirrorCopy(self._home, owner)
            except NotEnoughMemoryError as error:
                problem = str(error)
        send_text(sock, problem)
        return self._copies.get(owner.rank)

    def _take(self, sock: socket.socket, copy: MirrorCopy) -> MirrorCopy:
        """Receive and carry out a message; returns the mirror from now on."""
        kind, *words = receive_words(sock)
        try:
            if kind == ROWS:
                copy.put_rows(_receive(sock, copy, words[0]))
            elif kind == MOMENT:
                moment = Moment.from_words(words)
                _receive(sock, copy, moment.num_bytes)
                copy.put(moment)
            elif kind == EMPTY:
                self._copies.pop(copy.owner.rank).remove()
                copy = self._copies[copy.owner.rank] = MirrorCopy(self._home, copy.owner)
            else:
                raise ValueError(f"a message of kind {kind}")
        except NotEnoughMemoryError as error:
            send_text(sock, f"{self.address}: {error}")
            raise
        send_text(sock, "")
        return copy

    def _displace(self, rank: int) -> None:
        """End an earlier connection of the same owner, of which the other side may be long gone."""
        before = self._by_owner.pop(rank, None)
        thread = self._connections.get(before) if before is not None else None
        if before is not None and thread is not None:
            _end(before)
            thread.join()


def _receive(sock: socket.socket, copy: MirrorCopy, num_bytes: int) -> Tensor:
    """Receive the bytes of a message, uint8 `[num_bytes]`; without room for them, drop them."""
    try:
        data = copy.receive(num_bytes)
    except NotEnoughMemoryError:
        for begin in range(0, num_bytes, CHUNK_BYTES):  # the owner hears of it when it has sent all of them
            receive(sock, min(CHUNK_BYTES, num_bytes - begin))
        raise
    receive_into(sock, data.numpy().data)
    return data


def _end(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
