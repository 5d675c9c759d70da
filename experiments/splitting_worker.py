"""One worker of `experiments.splitting`; started by it in a network namespace, not by people.

It reads its job as JSON from the command line, then requests as lines of JSON, until there are none; rank 0
answers each with a line. `{"do": "count"}` counts bytes; `{"do": "time"}` lets the contenders take turns.
"""

import gc
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist

from data.batch import Batch
from dlrm.build import start_process_group
from dlrm.inputs import Ranks
from dlrm.memory import keep_freed_memory
from dlrm.sharding.splitting.choice_file import CHOICE_NAME
from experiments.splitting_counting import count
from experiments.splitting_workers import ANSWER
from experiments.splitting_workload import Workload
from experiments.training import Training

LASTING: Final = ("torchrec", "des")
"""Contenders whose layout does not depend on the links."""
WARM_UP_STEPS: Final = 3


def main() -> int:
    """Do what is asked."""
    job = json.loads(sys.argv[1])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    ranks = Ranks.from_environment()
    workload = Workload(**job["workload"])
    start_process_group(ranks, torch.device("cpu"))
    contest = Contest(job["model"], workload, ranks)
    requests: dict[str, Callable[[], dict[str, Any]]] = {
        "count": lambda: count(job["model"], workload, ranks),
        "time": contest.time,
    }
    for line in sys.stdin:
        answer = requests[json.loads(line)["do"]]()
        if ranks.rank == 0:
            print(f"{ANSWER}{json.dumps(answer)}", flush=True)
    dist.destroy_process_group()
    return 0


class Contest:
    """The contenders in one process group, on the same batches.

    Args:
        model: one of `splitting_workload.MODELS`.
        workload: see there.
        ranks: this process and the others.
    """

    def __init__(self, model: str, workload: Workload, ranks: Ranks) -> None:
        self._model, self._workload, self._ranks = model, workload, ranks
        self._batches: Iterator[Batch] = cycle(workload.batches(ranks))
        self._trainings: dict[str, Training] = {}

    def time(self) -> dict[str, Any]:
        """On the links as they are now: what `auto` chooses there, and the seconds of everybody's steps."""
        for name in LASTING:
            if name not in self._trainings:
                self._trainings[name] = self._build(name)
        with tempfile.TemporaryDirectory() as scratch:
            self._trainings["auto"] = self._build("auto", Path(scratch))
            choice = Path(scratch) / CHOICE_NAME
            chosen = json.loads(choice.read_text()) if choice.exists() else None
        rounds = self._rounds()
        del self._trainings["auto"]
        gc.collect()  # its tables refer to each other
        return {"chosen": chosen, "rounds": rounds}

    def _build(self, strategy: str, folder: Path | None = None) -> Training:
        inputs = self._workload.inputs(self._workload.config(self._model, strategy), self._ranks)
        return Training(inputs, self._batches, folder=folder)

    def _rounds(self) -> list[dict[str, float]]:
        """Seconds a step of each contender, for each round; in a new order each time, on all ranks alike."""
        for training in self._trainings.values():
            training.timed_steps(WARM_UP_STEPS)
        order, shuffled = sorted(self._trainings), random.Random(self._workload.seed)
        began = perf_counter()
        self._round(order)
        least, most = self._workload.rounds
        wanted = torch.tensor(max(least, min(most, int(self._workload.cell_s / (perf_counter() - began)))))
        dist.broadcast(wanted, 0)
        rounds = []
        for _ in range(int(wanted)):
            shuffled.shuffle(order)
            rounds.append(self._round(order))
        return rounds

    def _round(self, order: list[str]) -> dict[str, float]:
        took_s = {}
        for name in order:
            dist.barrier()
            began = perf_counter()
            self._trainings[name].timed_steps(self._workload.steps)
            dist.barrier()
            took_s[name] = (perf_counter() - began) / self._workload.steps
        return took_s


if __name__ == "__main__":
    raise SystemExit(main())
