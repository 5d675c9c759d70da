"""Messages between host and guests: lines of JSON over TCP, once both have shown that they know the key.

The key is the nonce of the host's announcement. Whoever can reach the launcher's store can read it there, as
torch's stores ask for no password: it keeps out strays (port scanners, workers of other jobs), and nobody who
means harm and can reach that store. Such a one could end the job anyway: keep the job's network closed.
"""

import hmac
import json
import selectors
import socket
from typing import Any, Final, Self

PROOF_BYTES: Final = 32
"""Of what shows that a process knows the key; from strangers, nothing more is read."""
_MAX_BYTES: Final = 256 << 20
"""No message is longer."""
_CHUNK_BYTES: Final = 1 << 16
_SEND_TIMEOUT_S: Final = 5.0


class LostError(Exception):
    """The other side is gone, or is none of ours."""


def proof(key: str, *, is_host: bool) -> bytes:
    """What shows that a side knows the key, without telling it; another for each, so that none is echoed.

    Returns:
        `PROOF_BYTES` bytes.
    """
    return hmac.digest(key.encode(), b"host" if is_host else b"guest", "sha256")


class Connection:
    """One open connection; the other side's death ends it.

    Args:
        sock: connected.
        key: that the other side has to know.
        is_host: whether this side is the host, which shows that it knows the key only to those who do.
    """

    def __init__(self, sock: socket.socket, key: str, *, is_host: bool) -> None:
        self.socket = sock
        sock.settimeout(_SEND_TIMEOUT_S)
        self.is_trusted = False
        """Whether the other side has shown that it knows the key."""
        self._key, self._is_host = key, is_host
        self._received = bytearray()

    @classmethod
    def to(cls, address: str, port: int, key: str, timeout_s: float) -> Self | None:
        """A guest's connection; None if nobody answers there."""
        try:
            connection = cls(socket.create_connection((address, port), timeout_s), key, is_host=False)
        except OSError:
            return None
        try:
            connection._show_key()
        except LostError:
            connection.close()
            return None
        return connection

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            LostError: it did not get there.
        """
        self._send(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The messages that what has arrived completes; call it when there is something to read.

        Raises:
            LostError: the other side is gone, does not know the key, or speaks another language.
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
            self._check_key()
            return []
        if b"\n" not in chunk:
            return []
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise LostError("no JSON") from error
        if not all(isinstance(message, dict) for message in messages):
            raise LostError("no message of ours")
        return messages

    def _check_key(self) -> None:
        if len(self._received) < PROOF_BYTES:
            return
        if not hmac.compare_digest(self._received, proof(self._key, is_host=not self._is_host)):
            raise LostError("a stranger")
        self._received.clear()
        self.is_trusted = True
        if self._is_host:
            self._show_key()

    def _show_key(self) -> None:
        self._send(proof(self._key, is_host=self._is_host))

    def _send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise LostError(str(error)) from error

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to read within that time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    @property
    def is_closed(self) -> bool:
        """Whether this side has ended it."""
        return self.socket.fileno() < 0

    def close(self) -> None:
        """End it."""
        self.socket.close()
