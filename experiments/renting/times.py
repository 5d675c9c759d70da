"""Times of a step by workers, batch and link, measured on this machine.

Each worker has a network namespace of its own and the same share of a core, so that several have no less than
one. Fewer workers than the most would have caches and memory to themselves: as many other processes train
alone meanwhile. In each pass of a round, all numbers of workers are started anew: this machine's speed
changes within minutes, and a cell's time is the median of several.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from experiments.harness.launch import worker_command, worker_environment
from experiments.harness.network import Network
from experiments.harness.processor_limits import Group
from experiments.harness.record import Row
from experiments.harness.workers import Workers
from experiments.renting.filler import READY

WORKER: Final = "experiments.renting.worker"
FILLER: Final = "experiments.renting.filler"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is timed."""

    workers: tuple[int, ...] = (1, 2, 4)
    """Numbers of workers, ascending from 1."""
    batches: tuple[int, ...] = (512, 768, 1024, 1536, 2048)
    """Samples of a step, over all workers, ascending."""
    gbit_per_s: float = 0.5
    """Speed of throttled links."""
    cores: float = 0.4
    """Processor time of each worker, in cores; what all together leave is for the kernel's network."""
    rounds: int = 4
    passes: int = 4
    """Passes of a round, in each of which all cells are timed."""
    seconds: float = 3.0
    """Time that a cell is timed for in a pass."""
    rows: int = 10_000
    """Of each of the 26 tables."""
    recipe: str = "kaggle"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Grid":
        """From a result's `config`."""
        tuples = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
        return cls(**{**values, **tuples})

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Workers and batches of the cells that the model is fitted to: the partial search of Scavenger."""
        return [
            (workers, batch)
            for workers in (self.workers[0], self.workers[-1])
            for batch in (self.batches[0], self.batches[-1])
        ]

    @property
    def held_out(self) -> list[tuple[int, int]]:
        """Workers and batches of all other cells."""
        cells = [(workers, batch) for workers in self.workers for batch in self.batches]
        return [cell for cell in cells if cell not in self.corners]


def measure(grid: Grid, number: int, turn: int, num_workers: int, groups: Sequence[Group]) -> Row:
    """Time the steps of a number of workers, in a pass of a round.

    Args:
        grid: what is timed.
        number: of the round.
        turn: number of the pass in the round; both decide the order of the batches.
        num_workers: number of workers.
        groups: control groups for as many workers as the grid has at most.

    Returns:
        Seconds of a step by batch without limits of the links (`free`), and, with several workers, with
        throttled ones (`throttled`), the measured speed of both, and the bytes of an exchange.
    """
    job = {"rows": grid.rows, "recipe": grid.recipe, "batches": grid.batches}
    row: Row = {"kind": "time", "round": number, "pass": turn, "workers": num_workers}
    own, others = groups[:num_workers], groups[num_workers:]
    with (
        Network(num_workers) as network,
        Workers(network, WORKER, job, threads=1) as workers,
        _fillers(job, others, grid.cores),
    ):
        row |= workers.ask(do="count")
        # in a network namespace, /sys shows no control groups: workers cannot enter theirs themselves
        for group, pid in zip(own, workers.pids, strict=True):
            group.enter(pid)
            group.limit(grid.cores)
        for name, speed in {"free": None, "throttled": grid.gbit_per_s}.items():
            if num_workers == 1 and speed is not None:
                continue
            network.limit(speed)
            order = list(grid.batches)
            Random(f"{number} {turn} {name}").shuffle(order)
            link = workers.ask(do="link")
            took = {
                batch: workers.ask(do="time", batch=batch, seconds=grid.seconds)["step_s"] for batch in order
            }
            row |= {
                name: {str(batch): took[batch] for batch in grid.batches},
                f"{name}_link": link["bytes_per_s"],
            }
    return row


@contextmanager
def _fillers(job: Mapping[str, Any], groups: Sequence[Group], cores: float) -> Iterator[None]:
    """A process in each of these groups trains alone during the block."""
    started: list[subprocess.Popen[str]] = []
    command = worker_command(FILLER, [json.dumps(job)])
    try:
        for _ in groups:
            started.append(
                subprocess.Popen(command, env=worker_environment(1), stdout=subprocess.PIPE, text=True)
            )
        for group, process in zip(groups, started, strict=True):
            assert process.stdout is not None
            if not any(line.strip() == READY for line in process.stdout):
                raise RuntimeError("a process that trains alone has ended; its error is above")
            group.enter(process.pid)
            group.limit(cores)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
