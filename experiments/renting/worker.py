"""Worker of `experiments.renting`, in a network namespace of its own.

It serves three requests: `{"do": "count"}` counts the bytes of an exchange, `{"do": "link"}` measures the
links, and `{"do": "time", "batch": B, "seconds": S}` times steps.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

import torch
import torch.distributed as dist

from dlrm.comm.links import measure_links
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks, of_rank_0
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.wire import counted
from experiments.harness.record import Row
from experiments.harness.training import Training
from experiments.harness.turns import seconds_of
from experiments.harness.worker_process import CPU, answer_requests, job_from, worker_process_group
from experiments.harness.workload import TimedBatches, Workload, inputs_of

WARM_UP_STEPS: Final = 3
LEAST_STEPS: Final = 4


class StepTimer:
    """Trains one model with batches of several sizes.

    Args:
        job: recipe, rows of a table, and the batches.
        ranks: this process and the others.
    """

    def __init__(self, job: Row, ranks: Ranks) -> None:
        self._ranks = ranks
        self._workloads = {
            batch: Workload(recipe=job["recipe"], rows=job["rows"], global_batch_size=batch, num_batches=4)
            for batch in job["batches"]
        }
        first = self._workloads[job["batches"][0]]
        loader = TimedBatches(first, steps=1, rank=ranks.rank, world_size=ranks.world_size)
        config = load_config(
            first.recipe,
            [
                *("train.device=cpu", "train.precision=fp32", "train.pipeline=none"),
                *("sharding.strategy=torchrec", "sharding.data_parallel_rows=0"),
            ],
        )
        inputs = inputs_of(config, first.recipe, ranks, first.features, loader)
        self._training = Training(inputs, iter(()))

    def count(self) -> dict[str, Any]:
        """Bytes of the dense gradients, and of a sample's embeddings with theirs (None: one worker)."""
        batch, workers = min(self._workloads), self._ranks.world_size
        self._use(batch)
        self._training.step()
        dense_bytes = 4 * sum(each.numel() for each in dense_parameters(self._training.model))
        if workers == 1:
            return {"dense_bytes": dense_bytes, "pooled_bytes": None}
        with counted() as wire:
            self._training.step()
        sent = torch.tensor(wire.value_bytes)
        dist.all_reduce(sent)
        # all but the ring all-reduce of dense gradients, on average over workers
        pooled = float(sent) / workers - 2 * (workers - 1) / workers * dense_bytes
        return {"dense_bytes": dense_bytes, "pooled_bytes": pooled * workers**2 / (workers - 1) / batch}

    def link(self) -> dict[str, Any]:
        """Speed of this worker's links to all others together; None: it has none."""
        if self._ranks.world_size == 1:
            return {"bytes_per_s": None}
        return {"bytes_per_s": measure_links(CPU).all_to_all.bytes_per_s}

    def time(self, batch: int, seconds: float) -> dict[str, Any]:
        """Mean seconds of a step, over about so many seconds."""
        self._use(batch)
        self._training.timed_steps(WARM_UP_STEPS)
        once_s = seconds_of(self._training.step)
        steps = of_rank_0(lambda: max(LEAST_STEPS, round(seconds / once_s)))
        return {"step_s": seconds_of(lambda: self._training.timed_steps(steps)) / steps}

    def _use(self, batch: int) -> None:
        made = self._workloads[batch].batches(self._ranks.rank, self._ranks.world_size)
        self._training.batches = cycle(made)


def main() -> int:
    """Serve the requests of the launcher."""
    job = job_from(None)
    with worker_process_group() as ranks:
        timer = StepTimer(job, ranks)
        answers: dict[str, Callable[..., Row]] = {
            "count": timer.count,
            "link": timer.link,
            "time": timer.time,
        }

        def answer(request: Row) -> Row:
            asked = {name: value for name, value in request.items() if name != "do"}
            return answers[request["do"]](**asked)

        answer_requests(ranks, answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
