"""Ranks of a process group without torchrun."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tests import forks

PATIENCE = timedelta(minutes=2)
"""Of ranks in a collective: none that is used here takes as long."""


class Ranks:
    """Runs `function(*arguments)` in `world_size` processes, as torchrun would start them.

    Args:
        function: of a module that can be imported; its errors make the test fail.
        arguments: for it.
        world_size: number of ranks.
        folder: for what they say.
    """

    def __init__(self, function: Callable[..., object], arguments: tuple, world_size: int, folder: Path):
        context = forks.context()
        # as torchrun's agent does: no port is free first and taken when rank 0 wants it
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._said = [folder / f"rank-{rank}-of-{world_size}.txt" for rank in range(world_size)]
        self._processes: list[BaseProcess] = []
        for rank, said in enumerate(self._said):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
            }
            process = context.Process(target=_rank, args=(function, arguments, environment, said))
            process.start()
            self._processes.append(process)

    def wait(self, timeout_s: float) -> None:
        """Until all have ended well; the first error of a rank fails the test, with what it said."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = [process.sentinel for process in self._processes if process.exitcode is None]
            assert not any(process.exitcode for process in self._processes), self._said_by_all()
            if not running:
                return
            assert wait(running, deadline - time.monotonic()), f"they did not end:\n{self._said_by_all()}"

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()
            process.close()

    def _said_by_all(self) -> str:
        return "\n".join(
            f"rank {rank}, exit code {process.exitcode}: {said.read_text()[-3000:] if said.exists() else ''}"
            for rank, (process, said) in enumerate(zip(self._processes, self._said, strict=True))
        )


def in_group(*work: Callable[[], object]) -> None:
    """Each in turn, in one process group of all ranks, for `Ranks` to run."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    for each in work:
        each()
    dist.barrier()  # no process leaves while others still talk to it
    dist.destroy_process_group()


def _rank(function: Callable[..., object], arguments: tuple, environment: dict[str, str], said: Path) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, so that the other ranks hear of it
