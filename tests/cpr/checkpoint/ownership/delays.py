"""A proxy before an S3 server that stops one client at a chosen request, as a machine that is paused."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal

HOP_BY_HOP: Final = {"connection", "expect", "keep-alive", "transfer-encoding"}
LONGEST_PAUSE_S: Final = 60.0
Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and content."""
REFUSED: Final[Answer] = (403, [("Content-Length", "0")], b"")
"""The answer after which a client stops retrying."""


class DelayingProxy:
    """Forwards requests; `pause_at` stops all of them, beginning with the first that matches.

    Args:
        port: of the server, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.paused = threading.Event()
        """Set when the request that was waited for is there."""
        self._target = port
        self._may_continue, self._late_is_over = threading.Event(), threading.Event()
        self._may_continue.set()
        self._late_is_over.set()
        self._is_dead = False
        self._match: tuple[str, str] | None = None
        self._before: Literal["request", "answer"] = "request"
        self._choosing = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # tells clients at once that they may send what they put

            def parse_request(self) -> bool:
                if not super().parse_request():
                    return False
                setattr(self, f"do_{self.command}", lambda: proxy._handle(self))
                return True

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: Final = self._server.server_address[1]

    def pause_at(self, method: str, part: str, before: Literal["request", "answer"] = "request") -> None:
        """Stop everything at the next request of this method with this part of a path.

        Args:
            method: of the request.
            part: of its path.
            before: what of it is held back: the request, so that it arrives late, or only the answer.
        """
        self._before, self._match = before, (method, part)

    def let_go(self, *, dead: bool = False) -> None:
        """What was held back passes.

        Args:
            dead: the client is no longer there: its late request arrives, and nothing of it after that.
        """
        self._is_dead = dead
        self._may_continue.set()
        assert self._late_is_over.wait(LONGEST_PAUSE_S)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        body = _body_of(handler)
        with self._choosing:
            is_late = self._match is not None and self._matches(handler, *self._match)
            if is_late:
                self._match = None
                self._may_continue.clear()
                self._late_is_over.clear()
        if is_late and self._before == "answer":
            answer = self._forward(handler, body)
            self._pause(is_late)
        else:
            self._pause(is_late)
            answer = REFUSED if self._is_dead and not is_late else self._forward(handler, body)
        if is_late:
            self._late_is_over.set()
        self._answer(handler, *(REFUSED if self._is_dead else answer))

    @staticmethod
    def _matches(handler: BaseHTTPRequestHandler, method: str, part: str) -> bool:
        return handler.command == method and part in handler.path

    def _pause(self, is_late: bool) -> None:
        if is_late:
            self.paused.set()
        assert self._may_continue.wait(LONGEST_PAUSE_S)
        if not is_late:
            assert self._late_is_over.wait(LONGEST_PAUSE_S)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._target, timeout=30)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP}
        connection.request(handler.command, handler.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.getheaders(), content

    @staticmethod
    def _answer(
        handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(content)


def _body_of(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    chunks = []
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        chunks.append(handler.rfile.read(size))
        handler.rfile.readline()
    while handler.rfile.readline().strip():  # trailers
        pass
    return b"".join(chunks)


@contextmanager
def delaying(port: int) -> Iterator[DelayingProxy]:
    """A proxy before the server at this port, until the end of the block."""
    proxy = DelayingProxy(port)
    thread = threading.Thread(target=proxy._server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy._is_dead = True
        proxy._may_continue.set()
        proxy._late_is_over.set()
        proxy._server.shutdown()
        thread.join()
        proxy._server.server_close()
