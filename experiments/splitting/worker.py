"""Worker of `experiments.splitting`, in a network namespace.

It serves three requests: `{"do": "count"}` counts bytes, `{"do": "errors"}` measures the errors by rounding,
and `{"do": "time"}` times the contenders in turns.
"""

import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist

from data.batch import Batch
from dlrm.launch.device import Ranks
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME
from dlrm.training.build import settle_strategies
from dlrm.training.data import Inputs
from experiments.harness.statistics import Ratio
from experiments.harness.training import Training, of_rank_0
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
from experiments.splitting.counting import count
from experiments.splitting.errors import wire_errors
from experiments.splitting.figures import PLANS, plan_with, strategies_in
from experiments.splitting.workload import Workload

WARM_UP_STEPS: Final = 3


def main() -> int:
    """Serve the requests of the launcher."""
    job = job_from(None)
    model, workload = job["model"], Workload(**job["workload"])
    with worker_process_group() as ranks:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "count": lambda: count(model, workload, ranks),
            "errors": lambda: wire_errors(model, workload, ranks),
            "time": PlanTimer(model, workload, ranks).time,
        }
        answer_requests(ranks, lambda request: answers[request["do"]]())
    return 0


class PlanTimer:
    """Times both plans and `auto` in one process group, on the same batches.

    Args:
        model: one of `experiments.splitting.workload.MODELS`.
        workload: batches and tables.
        ranks: this process and the others.
    """

    def __init__(self, model: str, workload: Workload, ranks: Ranks) -> None:
        self._model, self._workload, self._ranks = model, workload, ranks
        self._batches: Iterator[Batch] = cycle(workload.batches(ranks))
        self._trainings: dict[str, Training] = {}

    def time(self) -> dict[str, Any]:
        """Return the choice of `auto` at the current link speed, and the step times of all contenders."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)  # rank 0 writes the choice there
            settle_strategies(self._inputs("auto"), folder)
            chosen = self._chosen(folder)
            if plan_with(strategies_in(chosen)) is None:  # a mixture, which takes turns itself
                self._trainings["auto"] = Training(self._inputs("auto"), self._batches, folder=folder)
            for name in PLANS:
                if name not in self._trainings:
                    self._trainings[name] = Training(self._inputs(name), self._batches)
            rounds = self._rounds()
        if self._trainings.pop("auto", None):
            gc.collect()  # the model holds reference cycles
        return {"chosen": chosen, "rounds": rounds}

    def _chosen(self, folder: Path) -> dict[str, Any]:
        return of_rank_0(json.loads((folder / CHOICE_NAME).read_text()) if self._ranks.rank == 0 else {})

    def _inputs(self, strategy: str) -> Inputs:
        return self._workload.inputs(self._workload.config(self._model, strategy), self._ranks)

    def _rounds(self) -> list[dict[str, float]]:
        """Seconds per step by contender, for each round, in a new random order that all ranks share."""
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
            self._trainings[name].timed_steps(1)  # untimed, since other contenders have used the caches
            dist.barrier()
            began = perf_counter()
            self._trainings[name].timed_steps(self._workload.steps)
            dist.barrier()
            took_s[name] = (perf_counter() - began) / self._workload.steps
        return took_s

    def _is_enough(self, rounds: list[dict[str, float]], elapsed_s: float) -> bool:
        """Whether the intervals of all ratios are narrow enough, or the time is up."""
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
