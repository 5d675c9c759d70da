"""Messages between leader and clients: lines of JSON over TCP, after both sides have proven the key.

The key is the nonce in the leader's published address. Any process that can read the launcher's store can
read it there, as torch's stores have no passwords: the key keeps out strays (port scanners, workers of other
jobs), not attackers, who could end the job anyway. Keep the job's network closed.
"""

import hmac
import json
import selectors
import socket
from typing import Any, Final, Self

PROOF_BYTES: Final = 32
"""Size of the proof that a process knows the key; nothing more is read from strangers."""
_MAX_BYTES: Final = 256 << 20
"""Longest message."""
_CHUNK_BYTES: Final = 1 << 16
_SEND_TIMEOUT_S: Final = 5.0


class LostError(Exception):
    """The peer is gone, or does not speak this protocol."""


def proof(key: str, *, is_leader: bool) -> bytes:
    """`PROOF_BYTES` bytes that prove knowledge of the key; each side has its own, so that echoes fail."""
    return hmac.digest(key.encode(), b"leader" if is_leader else b"client", "sha256")


class Connection:
    """One open connection, which ends when the peer dies. The leader sends its proof after the client's."""

    def __init__(self, sock: socket.socket, key: str, *, is_leader: bool) -> None:
        self.socket = sock
        sock.settimeout(_SEND_TIMEOUT_S)
        self.is_trusted = False
        """Whether the peer has proven the key."""
        self._key, self._is_leader = key, is_leader
        self._received = bytearray()

    @classmethod
    def to(cls, address: str, port: int, key: str, timeout_s: float) -> Self | None:
        """Connect as a client; None if no process answers."""
        try:
            connection = cls(socket.create_connection((address, port), timeout_s), key, is_leader=False)
        except OSError:
            return None
        try:
            connection._send_proof()
        except LostError:
            connection.close()
            return None
        return connection

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            LostError: the message did not arrive.
        """
        self._send(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """Receive available data and return the completed messages.

        Raises:
            LostError: the peer is gone, does not know the key, or sent something else than messages.
        """
        limit = _CHUNK_BYTES if self.is_trusted else PROOF_BYTES - len(self._received)
        try:
            chunk = self.socket.recv(limit)
        except OSError as error:
            raise LostError(str(error)) from error
        if not chunk or len(self._received) + len(chunk) > _MAX_BYTES:
            raise LostError("the connection ended" if not chunk else "a message without end")
        self._received += chunk
        if not self.is_trusted:
            self._check_proof()
            return []
        if b"\n" not in chunk:
            return []
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise LostError("no JSON") from error
        if not all(isinstance(message, dict) for message in messages):
            raise LostError("unexpected protocol message")
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to read; False after the timeout."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed the connection."""
        return self.socket.fileno() < 0

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _check_proof(self) -> None:
        if len(self._received) < PROOF_BYTES:
            return
        if not hmac.compare_digest(self._received, proof(self._key, is_leader=not self._is_leader)):
            raise LostError("a stranger")
        self._received.clear()
        self.is_trusted = True
        if self._is_leader:
            self._send_proof()

    def _send_proof(self) -> None:
        self._send(proof(self._key, is_leader=self._is_leader))

    def _send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise LostError(str(error)) from error
