"""Runs of the trainer on two emulated nodes of this machine, for `experiments.recovery_soak` and for tests.

A node is a `cpr run` with the torchrun and the workers below it, a folder of its own for resident memory, and
if there is a `Network`, a network namespace of its own with a link that can be cut. A spare node can be
started in the place of one that is away, and retired later.
"""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from cpr.faults import Node
from experiments.harness.launch import free_port, worker_environment
from experiments.harness.network import LINK, Network

NODES: Final = 2
"""Nodes that train; the spare has the next number."""
MEMORY: Final = Path("/dev/shm")
SETTLE_S: Final = 3.0
"""How long the watcher of a launcher may take to notice its end and clean up."""
POLL_S: Final = 0.5
END_S: Final = 120.0
"""How long after the report nodes may take to end before they count as left behind."""
STOP_S: Final = 60.0
"""How long a node may take to stop on SIGTERM before it is killed."""
PORT: Final = 29400
"""Port of the rendezvous, in the namespace of the first node."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftovers:
    """How much a run left behind after its end."""

    processes: int
    memory_files: int
    """Files and folders in shared memory."""
    temporary_files: int
    """Temporary files, and folders of `cpr run`."""


class NodesRun:
    """One run over all nodes; `with` starts it, and leaves nothing running.

    Args:
        folder: a new folder for the run's folders, its log and its temporary files.
        arguments: of `dlrm.train`.
        workers_per_node: number of workers.
        module: that the workers run, with the command line of `dlrm.train`.
        environment: further variables for the workers.
        network: in which each node has a namespace; None: all nodes share this machine's network.
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
        self._launches: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._memory = [MEMORY / f"{self.folder.name}-{os.getpid()}-{number}" for number in range(NODES + 1)]
        self._endpoint = ""

    def __enter__(self) -> "NodesRun":
        (self.folder / "temporary").mkdir(parents=True)
        self._log = self._stack.enter_context((self.folder / "log.txt").open("w"))
        self._endpoint = f"{self._network.address(0)}:{PORT}" if self._network else f"localhost:{free_port()}"
        for node in range(NODES):
            self._start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in list(self._launches):
            self._stop(node)
        self._wipe(self._memory)
        self._stack.close()

    @property
    def nodes(self) -> list[Node]:
        """The nodes for a `Killer`, without the spare."""
        return [self._node(node) for node in range(NODES)]

    def start_spare(self) -> Node:
        """Start one more node than the run needs: it takes the place of the next one that is absent."""
        self._start(NODES)
        return self._node(NODES)

    def retire_spare(self) -> None:
        """Stop the spare node, whose place is free afterwards."""
        self._stop(NODES)

    def replace_node(self, node: int) -> None:
        """Kill all processes of a node, wipe its memory, and start a new one in its place at once."""
        launch = self._launches.pop(node)
        self._wipe([self._memory[node]])
        launch.wait()
        self._start(node)

    @property
    def run_folder(self) -> Path:
        """The trainer's folder, the same one however often workers were started.

        Raises:
            RuntimeError: there are several, so the run has started over; or none.
        """
        found = [path for path in (self.folder / "runs").iterdir() if path.is_dir()]
        if len(found) != 1:
            raise RuntimeError(f"a run has one folder, and there are {len(found)}:\n{self._end_of_log()}")
        return found[0]

    @property
    def steps_done(self) -> int:
        """The last step in the trainer's metrics."""
        lines = [line for path in self._found("metrics.jsonl") for line in path.read_text().splitlines()]
        return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)

    @property
    def is_reported(self) -> bool:
        """Whether training has ended and written its report."""
        return bool(self._found("report.json"))

    def wait_for_folder(self) -> Path:
        """Wait for the trainer's folder and return it.

        Raises:
            RuntimeError: the run ended before; the message has the end of the log.
        """
        self.wait_for(lambda: bool(self._found("config.json")))
        return self.run_folder

    def wait_for(self, is_reached: Callable[[], bool], timeout_s: float = math.inf) -> None:
        """Wait until the run has reached something.

        Raises:
            RuntimeError: a node ended before, or it took too long; the message has the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            has_ended = any(launch.poll() is not None for launch in self._launches.values())
            if has_ended or time.monotonic() > deadline:
                what = "a node has ended" if has_ended else "the run took too long"
                raise RuntimeError(f"{what}:\n{self._end_of_log()}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait until all nodes have ended, or should have, and return the run's report.

        Raises:
            RuntimeError: there is no report in time; the message has the end of the log.
        """
        deadline, reported = time.monotonic() + timeout_s, False
        while any(launch.poll() is None for launch in list(self._launches.values())):
            if not reported and self.is_reported:
                deadline, reported = time.monotonic() + END_S, True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if not self.is_reported:
            raise RuntimeError(f"the run did not end, or not well:\n{self._end_of_log()}")
        report: dict[str, Any] = json.loads((self.run_folder / "report.json").read_text())
        return report

    def failed_nodes(self) -> int:
        """Number of nodes that have not ended by themselves with exit code 0."""
        failed = {node: code for node, launch in self._launches.items() if (code := launch.poll()) != 0}
        for node, code in failed.items():
            logger.warning("node %d %s", node, "has not ended" if code is None else f"ended with code {code}")
        return len(failed)

    def leftovers(self) -> Leftovers:
        """Count what is left of the run after its end: processes, memory, unfinished files."""
        time.sleep(SETTLE_S)
        processes = self._processes(self._memory)
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
        for process in processes:
            logger.warning("left behind: process %d (%s)", process.pid, process.info["cmdline"])
        return Leftovers(len(processes), len(memory_files), len(temporary))

    def _found(self, name: str) -> list[Path]:
        return list((self.folder / "runs").glob(f"*/{name}"))

    def _wipe(self, memories: Sequence[Path]) -> None:
        """Kill all processes of the nodes with these memories, and remove the memories."""
        for process in self._processes(memories):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)

    def _processes(self, memories: Sequence[Path]) -> list[psutil.Process]:
        """Processes of nodes, found by their environment: some are not children of the launchers."""
        roots = {str(memory) for memory in memories}
        found = psutil.process_iter(["environ", "cmdline"])
        return [each for each in found if (each.info["environ"] or {}).get("CPR_RESIDENT_ROOT") in roots]

    def _node(self, node: int) -> Node:
        link = self._network.link(node) if self._network else None
        return Node(pid=self._launches[node].pid, memory=self._memory[node], link=link)

    def _stop(self, node: int) -> None:
        launch = self._launches.pop(node)
        if launch.poll() is None:
            launch.terminate()
            try:
                launch.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("node %d did not stop within %g s and is killed", node, STOP_S)
                launch.kill()
                launch.wait()

    def _start(self, node: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
        torchrun += ["--nproc-per-node", str(self._workers_per_node), "--max-restarts", "1000"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint]
        torchrun += ["--rdzv-id", self.folder.name]
        prefix: list[str] = []
        if self._network:
            prefix = self._network.command(node)
            # torchrun cannot find out which address is its own, as the namespaces share a hostname
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
        self._memory[node].mkdir(mode=0o700, exist_ok=True)
        self._launches[node] = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    def _end_of_log(self) -> str:
        return (self.folder / "log.txt").read_text()[-6000:]
