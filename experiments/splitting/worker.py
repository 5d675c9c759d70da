"""One worker of `experiments.splitting`; started by it in a network namespace, not by people.

It reads its job as JSON from the command line, then requests as lines of JSON, until there are none; rank 0
answers each with a line. `{"do": "count"}` counts bytes; `{"do": "errors"}` measures what rounding does to a
step; `{"do": "time"}` lets the contenders take turns.
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
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME
from dlrm.training.build import settle_strategies, start_process_group
from dlrm.training.data import Inputs
from experiments.harness.training import Training, of_rank_0
from experiments.harness.workers import ANSWER
from experiments.splitting.counting import count
from experiments.splitting.errors import wire_errors
from experiments.splitting.figures import PLANS, Ratio, plan_with, strategies_in
from experiments.splitting.workload import Workload

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
        "errors": lambda: wire_errors(job["model"], workload, ranks),
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
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)  # that of rank 0 counts
            settle_strategies(self._inputs("auto"), folder)
            chosen = self._chosen(folder)
            if plan_with(strategies_in(chosen)) is None:  # it is neither of the two plans
                self._trainings["auto"] = Training(self._inputs("auto"), self._batches, folder=folder)
            for name in PLANS:
                if name not in self._trainings:
                    self._trainings[name] = Training(self._inputs(name), self._batches)
            rounds = self._rounds()
        if self._trainings.pop("auto", None):
            gc.collect()  # its tables refer to each other
        return {"chosen": chosen, "rounds": rounds}

    def _chosen(self, folder: Path) -> dict[str, Any]:
        return of_rank_0(json.loads((folder / CHOICE_NAME).read_text()) if self._ranks.rank == 0 else {})

    def _inputs(self, strategy: str) -> Inputs:
        return self._workload.inputs(self._workload.config(self._model, strategy), self._ranks)

    def _rounds(self) -> list[dict[str, float]]:
        """Seconds a step of each contender, for each round; in a new order each time, on all ranks alike."""
        for training in self._trainings.values():
            training.timed_steps(WARM_UP_STEPS)
        order, shuffled = sorted(self._trainings), random.Random(self._workload.seed)
        rounds: list[dict[str, float]] = []
        began = perf_counter()
        while not of_rank_0(self._is_enough(rounds, perf_counter() - began)):
            shuffled.shuffle(order)
            rounds.append(self._round(order))
        return rounds

    def _round(self, order: list[str]) -> dict[str, float]:
        took_s = {}
        for name in order:
            self._trainings[name].timed_steps(1)  # it finds in the caches what others left there
            dist.barrier()
            began = perf_counter()
            self._trainings[name].timed_steps(self._workload.steps)
            dist.barrier()
            took_s[name] = (perf_counter() - began) / self._workload.steps
        return took_s

    def _is_enough(self, rounds: list[dict[str, float]], elapsed_s: float) -> bool:
        """Whether ratios are known well, whatever they are; or else, whether time is up."""
        least, most = self._workload.rounds
        if len(rounds) < least:
            return False
        if len(rounds) >= most or elapsed_s > self._workload.cell_s:
            return True
        ratios = [
            Ratio.of([each["torchrec"] / each[name] for each in rounds])
            for name in self._trainings
            if name != "torchrec"
        ]
        return max(each.reach for each in ratios) <= self._workload.reach


if __name__ == "__main__":
    raise SystemExit(main())
