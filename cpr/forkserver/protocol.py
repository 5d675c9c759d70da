"""Protocol between a proxy and the fork server, over an abstract Unix socket, for the same user only.

Proxy to server: the request as JSON after its length, with the streams' descriptors; then one byte for each
signal to forward. Server to proxy: the pid of the fork, then its exit status, four bytes each.
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
"""Timeout of data that the peer sends without delay."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Properties of a process that a fork takes over."""

    program: list[str]
    """See `program`."""
    agent: int
    """Pid of the agent that started the proxy."""
    environment: dict[str, str]
    arguments: list[str]
    folder: str
    """Current folder."""
    processors: list[int]
    """Allowed processors: `torchrun --numa-binding` gives each worker its own."""


def program() -> list[str]:
    """The program of this process: interpreter, options, and module or script, without arguments."""
    return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]


def listen(launcher: Process) -> socket.socket | None:
    """The socket of the fork server of a launcher's workers; None if another process has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(launcher))
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    return listener


def connect(launcher: Process) -> socket.socket | None:
    """Connect to the fork server of this user; None if there is none."""
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
    """Whether the peer has the user of this process: any user can bind any name of an abstract socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def send_request(connection: socket.socket, request: Request) -> None:
    """Send a request with this process's streams."""
    content = json.dumps(asdict(request)).encode(errors="surrogateescape")
    socket.send_fds(connection, [NUMBER.pack(len(content))], STREAMS)
    connection.sendall(content)


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
    """Receive a request, and descriptors of the streams, which the caller closes.

    Raises:
        OSError, ValueError, TypeError: the request is incomplete or invalid.
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
    """Receive exactly `size` bytes.

    Raises:
        ConnectionError: the peer ended before.
    """
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise ConnectionError("the peer has ended")
        content += more
    return content


def _address(launcher: Process) -> bytes:
    return f"\0cpr-forkserver-{os.getuid()}-{launcher.pid}-{launcher.start_ticks}".encode()
