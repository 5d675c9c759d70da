"""How a worker and the prepared process talk: a socket without a file, for the same user only.

Borrower to server: the request as JSON behind its length, with the streams' descriptors; then one byte for
each signal to pass on. Server to borrower: the pid of the fork, then how it ended, four bytes each.
"""

import json
import os
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

from cpr.processes import Process

NUMBER: Final = struct.Struct("<i")
STREAMS: Final = (0, 1, 2)
CONNECT_S: Final = 1.0
REQUEST_S: Final = 5.0
"""Longest that either side waits for what the other sends at once."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What makes a fork this worker and no other."""

    program: list[str]
    """See the function."""
    agent: int
    """Pid of the agent that started the borrower."""
    environment: dict[str, str]
    arguments: list[str]
    folder: str
    """Current folder."""
    processors: list[int]
    """Those that the borrower may run on: `torchrun --numa-binding` gives each worker its own."""


def program() -> list[str]:
    """What this process runs: interpreter, options, and module or script, without its arguments."""
    return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]


def listen(launcher: Process) -> socket.socket | None:
    """The socket of the prepared process of this launcher's workers; None if another process has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(launcher))
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    return listener


def connect(launcher: Process) -> socket.socket | None:
    """A connection to the prepared process of this user; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(_address(launcher))
    except OSError:
        connection.close()
        return None
    if not is_same_user(connection):
        connection.close()
        return None
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process: names of such sockets are anybody's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def send_request(connection: socket.socket, request: Request) -> None:
    """Send it with this process's streams."""
    content = json.dumps(asdict(request)).encode(errors="surrogateescape")
    socket.send_fds(connection, [NUMBER.pack(len(content))], STREAMS)
    connection.sendall(content)


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
    """The request, and descriptors of the streams, which the caller closes.

    Raises:
        OSError, ValueError, TypeError: it did not arrive whole.
    """
    connection.settimeout(REQUEST_S)
    head, streams, _, _ = socket.recv_fds(connection, NUMBER.size, len(STREAMS), socket.MSG_CMSG_CLOEXEC)
    try:
        if len(head) < NUMBER.size or len(streams) != len(STREAMS):
            raise ValueError("a request without its length or its streams")
        fields: dict[str, Any] = json.loads(receive(connection, *NUMBER.unpack(head)))
        return Request(**fields), streams
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes.

    Raises:
        ConnectionError: the other side ended before.
    """
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise ConnectionError("the other side has ended")
        content += more
    return content


def _address(launcher: Process) -> bytes:
    return f"\0cpr-standby-{os.getuid()}-{launcher.pid}-{launcher.start_ticks}".encode()
