"""Worker of `experiments.splitting`, in a network namespace.

It serves three requests: `{"do": "count"}` counts bytes, `{"do": "errors"}` measures the errors by rounding,
and `{"do": "time"}` times the contenders in turns.
"""

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from data.batch import Batch
from dlrm.launch.device import Ranks
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME
from dlrm.sharding.splitting.wire import counted
from dlrm.training.build import settle_strategies
from dlrm.training.data import Inputs
from experiments.harness.training import Training, of_rank_0
from experiments.harness.turns import Rounds, seconds_of, take_turns
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
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


def count(model: str, workload: Workload, ranks: Ranks) -> dict[str, list[float]]:
    """Bytes of embeddings, partial results and gradients in a step, of every rank, by plan.

    Replicated tables, which plans may choose by themselves, would make plans send different gradients.
    """
    sent = {}
    for plan in PLANS:
        config = workload.config(model, plan, "sharding.data_parallel_rows=0")
        training = Training(workload.inputs(config, ranks), cycle(workload.batches(ranks)))
        training.step()  # opens connections and allocates buffers
        with counted() as wire:
            training.step()
        sent[plan] = [0.0] * ranks.world_size
        dist.all_gather_object(sent[plan], wire.value_bytes)
    return sent


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
            choice = folder / CHOICE_NAME
            chosen = of_rank_0(json.loads(choice.read_text()) if self._ranks.rank == 0 else {})
            if plan_with(strategies_in(chosen)) is None:  # a mixture, which takes turns itself
                self._trainings["auto"] = Training(self._inputs("auto"), self._batches, folder=folder)
            for name in PLANS:
                if name not in self._trainings:
                    self._trainings[name] = Training(self._inputs(name), self._batches)
            for training in self._trainings.values():
                training.timed_steps(WARM_UP_STEPS)
            rounds = take_turns(self._trainings, self._turn, self._remaining)
        if self._trainings.pop("auto", None):
            gc.collect()  # the model holds reference cycles
        return {"chosen": chosen, "rounds": rounds}

    def _inputs(self, strategy: str) -> Inputs:
        return self._workload.inputs(self._workload.config(self._model, strategy), self._ranks)

    def _turn(self, name: str) -> float:
        training, steps = self._trainings[name], self._workload.steps
        training.timed_steps(1)  # untimed, since other contenders have used the caches
        return seconds_of(partial(training.timed_steps, steps)) / steps

    def _remaining(self, rounds: Rounds, elapsed_s: float) -> set[str]:
        others = {*self._trainings} - {"torchrec"}
        is_over = self._workload.effort.is_enough(rounds, elapsed_s, "torchrec", others)
        return set() if is_over else {*self._trainings}


if __name__ == "__main__":
    raise SystemExit(main())
