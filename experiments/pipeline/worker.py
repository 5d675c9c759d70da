"""Worker of `experiments.pipeline`: makes steps under each schedule, in the order that it is asked for."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from statistics import mean
from time import process_time
from typing import Any, Final

import torch.distributed as dist

from dlrm.launch.device import Ranks
from dlrm.pipeline.schedules import Fastest
from experiments.harness.memory import peak_bytes
from experiments.harness.record import Row
from experiments.harness.training import Training
from experiments.harness.turns import seconds_and_bytes_of
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
from experiments.pipeline.exchanges import KINDS, clocked, latency_s
from experiments.pipeline.schedules import NONE, SCHEDULES
from experiments.pipeline.shapes import Shape

WARM_UP_STEPS: Final = 3
"""Before the first turn, and in a turn before its timed steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for."""
    request = job_from(arguments)
    with worker_process_group() as ranks:
        bench = PipelineBench(Shape(**request["shape"]), request["schedules"], ranks)
        answers: dict[str, Callable[..., Row]] = {
            "choose": bench.choose,
            "exchanges": bench.exchanges,
            "round": bench.round,
            "memory": bench.memory,
        }
        answer_requests(ranks, lambda asked: answers[asked.pop("do")](**asked))
    return 0


class PipelineBench:
    """A model for each schedule, all with the same initial values; all ranks call all methods."""

    def __init__(self, shape: Shape, schedules: Sequence[str], ranks: Ranks) -> None:
        self._shape, self._ranks, self._steps = shape, ranks, shape.steps
        self._batches = shape.workload.batches(ranks)
        self._trainings = {name: self._training(SCHEDULES[name]) for name in schedules}
        for training in self._trainings.values():
            training.timed_steps(WARM_UP_STEPS)

    def choose(self) -> Row:
        """The schedule that `auto` chooses at the current speed of the links."""
        training = self._training(["train.pipeline=auto"])
        schedule = training.schedule
        assert isinstance(schedule, Fastest), "there are several workers"
        while schedule.chosen is None:
            training.step()
        chosen = schedule.chosen
        del training, schedule
        gc.collect()  # the model holds reference cycles
        return {"chosen": chosen}

    def exchanges(self) -> Row:
        """Bytes and collectives of a step without a schedule by kind, and the latency of a collective.

        Bytes are those of the rank that sends most.
        """
        training = self._trainings[NONE]
        with clocked(training.synchronizer, counts=True) as clock:
            training.step()
        sent = _of_ranks(clock.sent_bytes)
        return {
            "bytes": {kind: max(each[kind] for each in sent) for kind in KINDS},
            "calls": clock.calls,
            "latency_s": latency_s(),
        }

    def round(self, order: Sequence[str]) -> Row:
        """What a step of each schedule took (see `_turn`), by schedule."""
        return {name: self._turn(name) for name in order}

    def memory(self) -> Row:
        """The most memory that a worker has had in use, after steps of a turn."""
        for training in self._trainings.values():
            training.timed_steps(self._steps)
        return {"peak_bytes": max(_of_ranks(peak_bytes()))}

    def _training(self, overrides: Sequence[str]) -> Training:
        inputs = self._shape.workload.inputs(self._shape.config(overrides), self._ranks)
        return Training(inputs, cycle(self._batches))

    def _turn(self, name: str) -> Row:
        """Seconds, processor time and sent bytes of a step; without a schedule also seconds by exchange.

        All are means of the ranks.
        """
        training = self._trainings[name]
        training.timed_steps(WARM_UP_STEPS)
        with clocked(training.synchronizer) if name == NONE else nullcontext() as clock:
            before_s = process_time()
            took_s, sent = seconds_and_bytes_of(partial(training.timed_steps, self._steps))
            mine = {"step_s": took_s, "cpu_s": process_time() - before_s, "sent_bytes": sent}
        if clock is not None:
            mine |= {f"{kind}_s": clock.seconds[kind] for kind in KINDS}
        ranks = _of_ranks(mine)
        return {figure: mean(each[figure] for each in ranks) / self._steps for figure in mine}


def _of_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
