"""The connection from an owner to the keeper of its mirror.

Both sides prove a key, which the keeper made and gave to the owner through the process group. Then the owner
sends its form (`Owner`), and then messages, each of 7 integers (64 bits) and bytes: rows before the first
moment (kind and number of bytes), a moment (kind and `Moment.to_words`), or that the mirror is to be empty
again (kind). The keeper answers the form and each message with a text: an empty one when it is in memory, or
why there is no room for it.
"""

import hmac
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from torch import Tensor

from cpr.errors import NotEnoughMemoryError
from cpr.mirror.copy import Moment, Owner
from cpr.rendezvous.messages import PROOF_BYTES, proof

ROWS: Final = 1
MOMENT: Final = 2
EMPTY: Final = 3
WORDS: Final = 7
"""Integers before the bytes of a message."""
CONNECT_TIMEOUT_S: Final = 2.0
PATIENCE_S: Final = 20.0
"""How long `CHUNK_BYTES` of a message, or its answer, may take before the connection counts as lost."""
ADMISSION_S: Final = 300.0
"""How long a keeper may take to make memory: the first touch of much of it takes long."""
CHUNK_BYTES: Final = 1 << 20
MOST_TEXT_BYTES: Final = 64 << 20


class LinkLostError(OSError):
    """The other side is gone, does not answer in time, or does not speak this protocol."""


def send_text(sock: socket.socket, text: str) -> None:
    """Send a text with its length."""
    data = text.encode()
    sock.sendall(struct.pack("<q", len(data)) + data)


def receive_text(sock: socket.socket) -> str:
    """Receive a text with its length.

    Raises:
        LinkLostError: there is none.
    """
    (length,) = struct.unpack("<q", receive(sock, 8))
    if not 0 <= length <= MOST_TEXT_BYTES:
        raise LinkLostError(f"a text of {length} bytes")
    return receive(sock, length).decode(errors="replace")


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes.

    Raises:
        LinkLostError: the connection ends before.
    """
    data = bytearray(num_bytes)
    receive_into(sock, memoryview(data))
    return bytes(data)


def receive_into(sock: socket.socket, data: memoryview) -> None:
    """Fill `data`, bytes.

    Raises:
        LinkLostError: the connection ends before.
    """
    while data:
        num_bytes = sock.recv_into(data)
        if not num_bytes:
            raise LinkLostError("the connection has ended")
        data = data[num_bytes:]


def prove(sock: socket.socket, key: str, *, is_keeper: bool) -> None:
    """Prove the key to the other side, and check its proof.

    Raises:
        LinkLostError: the other side does not know the key.
    """
    sock.sendall(proof(key, is_leader=is_keeper))
    if not hmac.compare_digest(receive(sock, PROOF_BYTES), proof(key, is_leader=not is_keeper)):
        raise LinkLostError("the other side does not know the key")


@dataclass(frozen=True, kw_only=True)
class KeeperAddress:
    """Where owners find a keeper."""

    address: str
    port: int
    key: str = field(repr=False)

    def __str__(self) -> str:
        return self.address

    def link(self) -> "Link":
        """Connect; raises as `Link`."""
        return Link(self)


class Link:
    """The owner's side of a connection.

    Raises:
        OSError: the keeper cannot be reached.
    """

    def __init__(self, keeper: KeeperAddress) -> None:
        self._key = keeper.key
        self._socket = socket.create_connection((keeper.address, keeper.port), CONNECT_TIMEOUT_S)
        self._socket.settimeout(PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def introduce(self, owner: Owner) -> None:
        """Prove the key, and have the keeper make memory for this owner, unless it has it already.

        Raises:
            NotEnoughMemoryError: the keeper has no room.
            OSError: the keeper does not answer, or refuses the owner.
        """
        prove(self._socket, self._key, is_keeper=False)
        send_text(self._socket, owner.to_json())
        self._socket.settimeout(ADMISSION_S)
        self._receive_done()
        self._socket.settimeout(PATIENCE_S)

    def empty(self) -> None:
        """Have the keeper free the mirror, and make memory for it again; returns when that is done."""
        self._socket.sendall(np.array([EMPTY, *[0] * (WORDS - 1)], np.int64).tobytes())
        self._socket.settimeout(ADMISSION_S)
        self._receive_done()
        self._socket.settimeout(PATIENCE_S)

    def send_rows(self, data: Tensor) -> None:
        """Send rows before the first moment, uint8 `[n]` on the CPU; returns when they have arrived.

        Raises:
            NotEnoughMemoryError: the keeper has no room.
        """
        self._send([ROWS, data.numel(), *[0] * (WORDS - 2)], data)

    def send_moment(self, moment: Moment, data: Tensor) -> None:
        """Send a moment with its bytes; returns when it counts.

        Raises:
            NotEnoughMemoryError: the keeper has no room.
        """
        self._send([MOMENT, *moment.to_words()], data)

    def close(self) -> None:
        """End the connection, also while another thread waits for it."""
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, words: list[int], data: Tensor) -> None:
        self._socket.sendall(np.array(words, np.int64).tobytes())
        view = data.numpy().data
        for begin in range(0, len(view), CHUNK_BYTES):  # a slow network is no lost one
            self._socket.sendall(view[begin : begin + CHUNK_BYTES])
        self._receive_done()

    def _receive_done(self) -> None:
        if problem := receive_text(self._socket):
            raise NotEnoughMemoryError(problem)


def receive_words(sock: socket.socket) -> list[int]:
    """The integers of the next message; None of its bytes."""
    return [int(word) for word in np.frombuffer(receive(sock, 8 * WORDS), np.int64)]
