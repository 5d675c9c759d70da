"""What every worker process of an experiment does: join the process group, measure, and report.

Workers are started by experiments, not by people. They read a job as JSON from their command line.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.training.build import start_process_group
from experiments.harness.record import Row
from experiments.harness.workers import ANSWER

CPU: Final = torch.device("cpu")


@contextmanager
def worker_process_group(*, keeps_memory: bool = True, device: torch.device = CPU) -> Iterator[Ranks]:
    """An open process group, closed at the end of the block unless that fails.

    Args:
        device: of this worker; decides the backend.
        keeps_memory: keep freed memory in the process, as the trainer does (`dlrm.launch.malloc`).
    """
    for library in ("torchrec", "torch.fx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if keeps_memory:
        keep_freed_memory()
    ranks = Ranks.from_environment()
    start_process_group(ranks, device)
    yield ranks
    dist.destroy_process_group()


def job_from(arguments: Sequence[str] | None) -> Row:
    """The job on a worker's command line; None: that of this process."""
    job: Row = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    return job


def write_measured(job: Row, ranks: Ranks, measured: Row) -> None:
    """Have rank 0 write the measurement for `experiments.harness.launch.measure_under_torchrun`."""
    if ranks.rank == 0:
        Path(job["out"]).write_text(json.dumps(measured))


def answer_requests(ranks: Ranks, answer: Callable[[Row], Row]) -> None:
    """Answer the launcher's requests (`experiments.harness.workers.Workers`) until it closes the input.

    Args:
        ranks: this process and the others; rank 0 prints the answers.
        answer: does what a request asks for, on all ranks together.
    """
    for line in sys.stdin:
        answered = answer(json.loads(line))
        if ranks.rank == 0:
            print(f"{ANSWER}{json.dumps(answered)}", flush=True)
