"""Whole runs of the trainer on two nodes of this machine, as `experiments.recovery_soak` disturbs them.

A node is a `cpr run` with the torchrun and the workers below it, a folder of its own for resident memory, and
if there is a `Network`, a network namespace of its own with a link that can be cut.
"""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import psutil

from cpr.faults import Node
from experiments.launch import worker_environment
from experiments.network import LINK, Network

NODES: Final = 2
MEMORY: Final = Path("/dev/shm")
SETTLE_S: Final = 3.0
"""How long what watches for a launcher's end may take to see it and clear up."""
POLL_S: Final = 0.5
PORT: Final = 29400
"""Of the rendezvous, in the namespace of the first node."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftovers:
    """What a run left behind that it should not have."""

    processes: int
    memory_files: int
    """And folders, in shared memory."""
    temporary_files: int
    """And folders of `cpr run`."""


class NodesRun:
    """One run over all nodes; `with` starts it, and leaves nothing running.

    Args:
        folder: for the run's folders, its log and its temporary files; new.
        arguments: of `dlrm.train`.
        workers_per_node: on each.
        module: what the workers run, `dlrm.train` or the like.
        environment: more of it, for the workers.
        network: where the nodes are; None: all on this machine's own.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        workers_per_node: int,
        *,
        module: str = "dlrm.train",
        environment: Mapping[str, str] | None = None,
        network: Network | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self._arguments = list(arguments)
        self._workers_per_node = workers_per_node
        self._module, self._environment, self._network = module, dict(environment or {}), network
        self._launches: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._memory = [MEMORY / f"{self.folder.name}-{os.getpid()}-{number}" for number in range(NODES)]

    def __enter__(self) -> "NodesRun":
        (self.folder / "temporary").mkdir(parents=True)
        log = self._stack.enter_context((self.folder / "log.txt").open("w"))
        endpoint = f"{self._network.address(0)}:{PORT}" if self._network else f"localhost:{_free_port()}"
        for node, memory in enumerate(self._memory):
            memory.mkdir(mode=0o700)
            self._launches.append(self._launch(node, endpoint, log))
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self._launches:
            if launch.poll() is None:
                launch.terminate()
                launch.wait()
        for memory in self._memory:
            shutil.rmtree(memory, ignore_errors=True)
        self._stack.close()

    @property
    def nodes(self) -> list[Node]:
        """For a `Killer`."""
        links = [self._network.link(node) if self._network else None for node in range(NODES)]
        return [
            Node(pid=launch.pid, memory=memory, link=link)
            for launch, memory, link in zip(self._launches, self._memory, links, strict=True)
        ]

    @property
    def run_folder(self) -> Path:
        """Of the trainer; there is one, however often workers were started."""
        (found,) = (path for path in (self.folder / "runs").iterdir() if path.is_dir())
        return found

    def wait_for_folder(self) -> Path:
        """The trainer's folder, as soon as it is there.

        Raises:
            RuntimeError: the run ended before; the message has the end of the log.
        """
        while not list((self.folder / "runs").glob("*/config.json")):
            if any(launch.poll() is not None for launch in self._launches):
                raise RuntimeError(f"the run did not begin:\n{self._end_of_log()}")
            time.sleep(POLL_S)
        return self.run_folder

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The run's report, when all nodes have ended.

        Raises:
            RuntimeError: a node failed, or they did not end; the message has the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while any(launch.poll() is None for launch in self._launches):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not end:\n{self._end_of_log()}")
            time.sleep(POLL_S)
        codes = [launch.returncode for launch in self._launches]
        if any(codes):
            raise RuntimeError(f"the nodes ended with {codes}:\n{self._end_of_log()}")
        report: dict[str, Any] = json.loads((self.run_folder / "report.json").read_text())
        return report

    def leftovers(self) -> Leftovers:
        """What is still there of the run, after its end: processes, memory, unfinished files."""
        time.sleep(SETTLE_S)
        marks = {f"CPR_RESIDENT_ROOT={memory}".encode() for memory in self._memory}
        processes = [pid for pid in psutil.pids() if marks & _environment_of(pid)]
        memory_files = [
            path
            for memory in self._memory
            for path in memory.rglob("*")
            if path.is_file() or path.parent != memory  # the user's folder stays
        ]
        temporary = [
            path
            for path in (*(self.folder / "temporary").rglob("*"), *self.run_folder.rglob("*.tmp*"))
            if path.is_file() or path.name.startswith("cpr-")
        ]
        for path in (*memory_files, *temporary):
            logger.warning("left behind: %s", path)
        for pid in processes:
            logger.warning("left behind: process %d (%s)", pid, _command_of(pid))
        return Leftovers(len(processes), len(memory_files), len(temporary))

    def _launch(self, node: int, endpoint: str, log: IO[str]) -> "subprocess.Popen[bytes]":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
        torchrun += ["--nproc-per-node", str(self._workers_per_node), "--max-restarts", "1000"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", self.folder.name]
        prefix: list[str] = []
        if self._network:
            prefix = self._network.command(node)
            # torchrun does not find out by itself which address is its own: the namespaces share a hostname
            torchrun += ["--local-addr", self._network.address(node), "--rdzv-conf"]
            torchrun += [f"is_host={node == 0},keep_alive_interval=1,keep_alive_max_attempt=5"]
        command = [*prefix, sys.executable, "-m", "cpr.cli", "run", "--restarts", "1000", "--", *torchrun]
        command += ["-m", self._module, *self._arguments, f"train.run_folder={self.folder / 'runs'}"]
        environment = {
            **worker_environment(threads=1),
            "CPR_RESIDENT_ROOT": str(self._memory[node]),
            "TMPDIR": str(self.folder / "temporary"),
            **({"GLOO_SOCKET_IFNAME": LINK} if self._network else {}),
            **self._environment,
        }
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def _end_of_log(self) -> str:
        return (self.folder / "log.txt").read_text()[-6000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "it has ended meanwhile"


def _environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or is another user's
        return set()
