"""One worker of `experiments.checkpointing`; started by torchrun, not by people.

Reads its job as JSON from the command line. Rank 0 appends each measurement as a line of JSON to the job's
`out`, as soon as it is there. First comes the *memory pass*: every saver for itself, from memory that was
given back to the system, so that what it needs shows. Then a warm-up pass and the timed rounds, in which
all savers have their memory ready, as from the second save of a run on.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from dlrm.launch.device import Ranks
from dlrm.training.build import start_process_group
from experiments.checkpointing.bench import Bench, Measured
from experiments.checkpointing.job import Job, start_training

WARM_UP_STEPS: Final = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the job asks for."""
    job = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    training = start_training(Job(**job["job"]), ranks)
    training.timed_steps(WARM_UP_STEPS)
    bench = Bench(Job(**job["job"]), training, Path(job["scratch"]), ranks.rank)
    out = Path(job["out"])

    def tell(key: str, measured: Measured) -> None:
        if ranks.rank == 0:
            with out.open("a") as file:
                file.write(json.dumps({"key": key, **measured}) + "\n")

    if job["memory"]:
        tell("memory", bench.memory_pass())
    if job["rounds"]:
        bench.open()
        bench.warm_up()
        for number in job["rounds"]:
            tell(f"round {number}", {"round": number, **bench.round(backwards=number % 2 == 1)})
        bench.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
