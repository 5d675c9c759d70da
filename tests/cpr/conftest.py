"""A real S3 server on loopback, and workers in a world of one."""

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cpr.checkpoint.runs import Run
from tests.cpr.recovery.workers import BATCH, Worker

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever talks to the S3 server starts a real process, and so is a system test."""
    for item in items:
        if {"s3", "start_s3"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.system)


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


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start(world_of_one: None, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs on one directory, or on the folder or URI given; those that are left open are closed."""
    runs = []

    def work(folder: Path | str = "checkpoint", **options: object) -> Run:
        run = Run(folder if "://" in str(folder) else tmp_path / folder, **options)
        runs.append(run)
        return run

    yield work
    for run in runs:
        run.checkpointer.close(abandon=True)


@pytest.fixture
def new_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    """Makes workers, one at a time; the last one is killed at the end."""
    memory = tmp_path / "memory"
    memory.mkdir()
    workers: list[Worker | None] = []

    def make(*, restarted: bool = True, **options: object) -> Worker:
        if restarted:
            monkeypatch.setenv("CPR_CONTINUES", "1")
        else:
            monkeypatch.delenv("CPR_CONTINUES", raising=False)
        workers.append(None)
        workers[-1] = Worker(
            options.pop("folder", tmp_path / "checkpoint"),
            memory,
            **{"save_every_steps": 5, "total_samples": 100 * BATCH, "moment": "consistent", **options},
        )
        return workers[-1]

    yield make
    if workers and workers[-1] is not None and dist.is_initialized():
        workers[-1].die()
    elif dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def wipe(tmp_path: Path) -> Callable[[], None]:
    """Loses the memory of dead workers, as a lost node does."""

    def work() -> None:
        for folder in (tmp_path / "memory").glob("*/*/*"):
            if folder.is_dir():
                shutil.rmtree(folder)

    return work
