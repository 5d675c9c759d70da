"""Trains alone until it is killed, on what a worker of `experiments.renting` trains on: keeps a core busy."""

from typing import Final

from experiments.harness.worker_process import job_from, worker_process_group
from experiments.renting.worker import StepTimer

READY: Final = "ready"
"""Line on the standard output once training has begun."""


def main() -> None:
    """Train with the largest batch."""
    job = job_from(None)
    with worker_process_group() as ranks:
        timer = StepTimer(job, ranks)
        batch = max(job["batches"])
        timer.time(batch, 0.0)
        print(READY, flush=True)
        while True:
            timer.time(batch, 1.0)


if __name__ == "__main__":
    main()
