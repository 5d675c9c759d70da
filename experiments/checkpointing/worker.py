"""Worker of `experiments.checkpointing`.

Rank 0 appends each measurement as a line of JSON to the job's `out` at once. First comes the memory pass:
every saver alone, after free memory was returned to the system, so that its needs show. A warm-up pass and
the timed rounds follow, in which the memory of all savers is warm, as from the second save of a real run on.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.checkpointing.bench import Bench, Measured
from experiments.checkpointing.job import Job, start_training
from experiments.harness.worker_process import job_from, worker_process_group

WARM_UP_STEPS: Final = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows that the job asks for."""
    job = job_from(arguments)
    with worker_process_group(keeps_memory=False) as ranks:  # the launcher's environment decides that
        training = start_training(Job(**job["job"]), ranks)
        training.timed_steps(WARM_UP_STEPS)
        bench = Bench(Job(**job["job"]), training, Path(job["scratch"]), ranks.rank)

        def append(key: str, measured: Measured) -> None:
            if ranks.rank == 0:
                with Path(job["out"]).open("a") as file:
                    file.write(json.dumps({"key": key, **measured}) + "\n")

        if job["memory"]:
            append("memory", bench.memory_pass())
        if job["rounds"]:
            bench.open()
            bench.warm_up()
            for number in job["rounds"]:
                append(f"round {number}", {"round": number, **bench.round(backwards=number % 2 == 1)})
            bench.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
