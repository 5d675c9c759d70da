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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from data.batch import Batch
from dlrm.launch.device import Ranks, of_rank_0
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME
from dlrm.sharding.splitting.wire import counted
from dlrm.training.build import settle_strategies
from dlrm.training.data import Inputs
from dlrm.training.trainer import NUM_SCALARS
from experiments.harness.training import Training
from experiments.harness.turns import Rounds, seconds_of, take_turns
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
from experiments.splitting.figures import PLANS, WIRE_DTYPES, plan_with, strategies_in
from experiments.splitting.workload import TerabyteWorkload

WARM_UP_STEPS: Final = 3


def main() -> int:
    """Serve the requests of the launcher."""
    job = job_from(None)
    model, workload = job["model"], TerabyteWorkload(**job["workload"])
    with worker_process_group() as ranks:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "count": lambda: count(model, workload, ranks),
            "errors": lambda: wire_errors(model, workload, ranks),
            "time": PlanTimer(model, workload, ranks).time,
        }
        answer_requests(ranks, lambda request: answers[request["do"]]())
    return 0


def count(model: str, workload: TerabyteWorkload, ranks: Ranks) -> dict[str, list[float]]:
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


def wire_errors(model: str, workload: TerabyteWorkload, ranks: Ranks) -> dict[str, Any]:
    """Relative errors of logits and of gradients, by wire dtype; the same on all ranks.

    The same split model makes the same step on the same batch from the same initial values, with partial
    results and their gradients in fp32 and rounded. An error is the norm of the difference over the norm in
    fp32.
    """
    exact = _step(model, "fp32", workload, ranks)
    errors = {}
    for dtype in WIRE_DTYPES:
        rounded = _step(model, dtype, workload, ranks)
        errors[dtype] = {kind: _relative(rounded[kind], exact[kind]) for kind in exact}
    return errors


def _step(model: str, wire_dtype: str, workload: TerabyteWorkload, ranks: Ranks) -> dict[str, Tensor]:
    """Logits of this rank's samples, and gradients of all replicated dense parameters, averaged in fp32."""
    config = workload.config(model, "des", f"sharding.wire_dtype={wire_dtype}")
    training = Training(workload.inputs(config, ranks), cycle(workload.batches(ranks)))
    batch = next(training.batches)
    training.optimizers.begin_step(0)
    logits = training.model(batch.dense, batch.sparse)
    loss = binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    training.synchronizer.average(torch.zeros(NUM_SCALARS))
    gradients = [each.grad for each in dense_parameters(training.model) if each.grad is not None]
    del training
    gc.collect()  # the model holds reference cycles
    return {"logits": logits.detach(), "gradients": torch.cat([each.flatten() for each in gradients])}


def _relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact values of all ranks."""
    squares = torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()])
    dist.all_reduce(squares)
    difference, whole = squares.sqrt().tolist()
    return float(difference / whole)


class PlanTimer:
    """Times both plans and `auto` for a model in one process group, on the same batches."""

    def __init__(self, model: str, workload: TerabyteWorkload, ranks: Ranks) -> None:
        self._model, self._workload, self._ranks = model, workload, ranks
        self._batches: Iterator[Batch] = cycle(workload.batches(ranks))
        self._trainings: dict[str, Training] = {}

    def time(self) -> dict[str, Any]:
        """Return the choice of `auto` at the current link speed, and the step times of all contenders."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)  # rank 0 writes the choice there
            settle_strategies(self._inputs("auto"), folder)
            choice = folder / CHOICE_NAME
            chosen = of_rank_0(lambda: json.loads(choice.read_text()))
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
