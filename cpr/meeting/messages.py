"""Messages between host and guests: lines of JSON over TCP."""

import json
import selectors
import socket
from typing import Any, Final, Self

_MAX_BYTES: Final = 256 << 20
"""No message is longer; a stranger's stream must not fill the memory."""
_CHUNK_BYTES: Final = 1 << 16
_SEND_TIMEOUT_S: Final = 5.0


class LostError(Exception):
    """The other side is gone, or is none of ours."""


class Connection:
    """One open connection; the other side's death ends it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(_SEND_TIMEOUT_S)
        self._received = bytearray()

    @classmethod
    def to(cls, address: str, port: int, timeout_s: float) -> Self | None:
        """None if nobody answers there."""
        try:
            return cls(socket.create_connection((address, port), timeout_s))
        except OSError:
            return None

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            LostError: it did not get there.
        """
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LostError(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """The messages that what has arrived completes; call it when there is something to read.

        Raises:
            LostError: the other side is gone, or speaks another language.
        """
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
        except OSError as error:
            raise LostError(str(error)) from error
        if not chunk or len(self._received) + len(chunk) > _MAX_BYTES:
            raise LostError("the connection ended" if not chunk else "a message without end")
        *lines, rest = (self._received + chunk).split(b"\n")
        self._received = rest
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise LostError("no JSON") from error
        if not all(isinstance(message, dict) for message in messages):
            raise LostError("no message of ours")
        return messages

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
