"""From `kill -9` of a worker to the first new training step: rows of `experiments.recovery`."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from experiments.checkpointing.job import TrainingJob
from experiments.harness.launch import Launch, running, torchrun_command
from experiments.harness.record import Row
from experiments.recovery.timeline import have_all, phases, read_marks

CONTENDERS: Final = {"ours": "experiments.recovery.ours", "rival": "experiments.recovery.baseline"}
FRESH_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""What plain torchrun needs for the ranks to find each other after a restart; CPR does without."""
TRAINING_S: Final = (3.0, 5.0)
"""The kill comes at a seeded random time in this range after the first step of all ranks."""
PATIENCE_S: Final = 240.0
"""Longest that a start or a restart may take before the measurement is given up."""
POLL_S: Final = 0.05


class Timing:
    """Starts runs, kills a worker of each, and reads off how long each phase of the restart took.

    Args:
        job: the model.
        scratch: folder for checkpoints and timelines; the caller removes it.
        seed: decides which worker is killed, and when.
    """

    def __init__(self, job: TrainingJob, scratch: Path, seed: int) -> None:
        self._job, self._scratch, self._seed = job, scratch.absolute(), seed
        self._timeline = self._scratch / "timeline.jsonl"

    def round(self, number: int, world_size: int) -> Row:
        """Seconds of each phase of one restart of each contender; they take turns in coming first."""
        if not self._saved("rival", world_size).exists():
            with self._run("rival", world_size, save=True) as launch:
                launch.check_ended_well()
        names = list(CONTENDERS)[:: -1 if number % 2 else 1]
        took = {name: self._restart(name, number, world_size) for name in names}
        return {"round": number, "world_size": world_size, "phases": took}

    def _restart(self, name: str, number: int, world_size: int) -> dict[str, float]:
        rng = random.Random(f"{self._seed} {number} {world_size}")  # the same for both contenders
        victim, trains_s = rng.randrange(world_size), rng.uniform(*TRAINING_S)
        with self._run(name, world_size) as launch:
            self._wait_for_steps(launch, 0, world_size)
            time.sleep(trains_s)
            pids = {mark["rank"]: mark["pid"] for mark in read_marks(self._timeline)}
            killed_at = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            self._wait_for_steps(launch, 1, world_size)
        return phases(read_marks(self._timeline), 1, killed_at)

    def _wait_for_steps(self, launch: Launch, generation: int, world_size: int) -> None:
        """Wait until every rank of a generation has done a step.

        Raises:
            RuntimeError: the launcher ended or the wait took too long; the message holds the end of its
                output.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not have_all(read_marks(self._timeline), "stepped", generation, world_size):
            if (status := launch.process.poll()) is not None:
                raise launch.failure(f"ended with status {status}")
            if time.monotonic() > deadline:
                raise launch.failure("took too long")
            time.sleep(POLL_S)

    @contextmanager
    def _run(self, name: str, world_size: int, save: bool = False) -> Iterator[Launch]:
        """A run of a contender with a timeline of its own, ended at the end of the block."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._timeline.unlink(missing_ok=True)
        request = {
            "job": asdict(self._job),
            "timeline": str(self._timeline),
            "saved": str(self._saved(name, world_size)),
            "save": save,
        }
        command = torchrun_command(CONTENDERS[name], [json.dumps(request)], world_size, restarts=3)
        if name == "rival":
            command = ["env", FRESH_STORE, *command]
        with running(command, threads=1) as launch:
            yield launch

    def _saved(self, name: str, world_size: int) -> Path:
        return self._scratch / f"{name}-{world_size}"
