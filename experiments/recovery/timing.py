"""Starts runs of both contenders, kills their workers, and reads off when they have reached what."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil

from experiments.checkpointing.job import TrainingJob
from experiments.harness.launch import Launch, running, torchrun_command
from experiments.recovery.timeline import Mark, have_all, phases, read_marks

CONTENDERS: Final = {"ours": "experiments.recovery.ours", "rival": "experiments.recovery.baseline"}
FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""What plain torchrun needs for the ranks to find each other after a restart; CPR does without."""
PATIENCE_S: Final = 1200.0
"""Longest that a start or a restart may take before the measurement is given up."""
POLL_S: Final = 0.05


class TimedRun:
    """A run of a contender under torchrun; made by `timed_run`."""

    def __init__(self, launch: Launch, timeline: Path, world_size: int, began: float) -> None:
        self._launch, self._timeline, self._world_size = launch, timeline, world_size
        self._began = began
        """When the newest generation of workers was called for."""
        self.generation = 0

    def wait_for(self, event: str) -> dict[str, float]:
        """Wait until every rank of this generation has reached `event`.

        Returns:
            Seconds of each phase until then, from the launch or from the newest kill.

        Raises:
            RuntimeError: the launcher ended or the wait took too long; the message holds the end of its
                output.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not have_all(read_marks(self._timeline), event, self.generation, self._world_size):
            if (status := self._launch.process.poll()) is not None:
                raise self._launch.failure(f"ended with status {status}")
            if time.monotonic() > deadline:
                raise self._launch.failure("took too long")
            time.sleep(POLL_S)
        return phases(read_marks(self._timeline), self.generation, self._began)

    def marks(self, event: str) -> dict[int, Mark]:
        """What the ranks of this generation have recorded with an event, by rank."""
        found = read_marks(self._timeline)
        return {
            each["rank"]: each
            for each in found
            if (each["event"], each["generation"]) == (event, self.generation)
        }

    @property
    def processes(self) -> list[psutil.Process]:
        """The launcher and all that it has started."""
        launcher = psutil.Process(self._launch.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def kill(self, rank: int, *, with_memory: bool = False) -> dict[str, float]:
        """Kill a worker with -9, and wait until every rank has done a new step; returns as `wait_for`.

        `with_memory` also removes what CPR keeps of the worker in shared memory, as if its node were lost.
        """
        victim = self.marks("stepped")[rank]
        if with_memory and victim["memory"]:
            shutil.rmtree(victim["memory"])  # at once, as it is freed when the worker is dead
        self._began = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        self.generation += 1
        return self.wait_for("stepped")


@contextmanager
def timed_run(
    name: str, job: TrainingJob, world_size: int, scratch: Path, threads: int = 1, **asked: Any
) -> Iterator[TimedRun]:
    """A run of one of `CONTENDERS`, ended at the end of the block.

    Args:
        name: of the contender.
        job: the model.
        world_size: number of workers.
        scratch: folder for the contender's checkpoints and the timeline; the caller removes it.
        threads: of each worker.
        asked: more of what the worker is asked for.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    timeline = scratch.absolute() / "timeline.jsonl"
    timeline.unlink(missing_ok=True)
    saved = str(saved_in(scratch, name, world_size).absolute())
    request = {"job": asdict(job), "timeline": str(timeline), "saved": saved, **asked}
    command = torchrun_command(CONTENDERS[name], [json.dumps(request)], world_size, restarts=3)
    environment = FRESH_STORE if name == "rival" else {}
    began = time.time()
    with running(command, threads=threads, environment=environment) as launch:
        yield TimedRun(launch, timeline, world_size, began)


def saved_in(scratch: Path, name: str, world_size: int) -> Path:
    """Folder of a contender's checkpoints."""
    return scratch / f"{name}-{world_size}"
