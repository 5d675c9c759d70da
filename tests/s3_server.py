"""Fixtures: a real S3 server on loopback."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

START_S = 60.0


@dataclass
class S3Server:
    """One moto server, a process of its own."""

    port: int
    process: subprocess.Popen

    def uri(self, path: str) -> str:
        """URI of `bucket/prefix` on it, with credentials."""
        return f"s3://key:secret@{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def request(self, method: str, path: str, body: str | None = None) -> str:
        """Talk to it directly."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status < 300, text
        return text

    def is_up(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture(scope="session")
def start_s3() -> Iterator[Callable[[], S3Server]]:
    """Starts S3 servers with a bucket called `bucket`; they are killed by their pids at the end."""
    servers = []

    def start() -> S3Server:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        # Whatever credentials the machine has are none of the server's business.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        server = S3Server(port, process)
        servers.append(server)
        deadline = time.monotonic() + START_S
        while not server.is_up():
            assert process.poll() is None, "the S3 server ended at once"
            assert time.monotonic() < deadline, "the S3 server does not start"
            time.sleep(0.05)
        server.request("PUT", "/bucket")
        return server

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def s3(start_s3: Callable[[], S3Server]) -> S3Server:
    """An S3 server for all tests; each uses a prefix of its own in `bucket`."""
    return start_s3()
