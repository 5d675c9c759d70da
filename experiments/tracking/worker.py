"""The worker of one launch of `experiments.tracking`; started by torchrun, not by people.

Reads its job as JSON from the command line and writes what it measured as JSON to the job's `out`. It trains
one model all the time. In each round every way to track has a few steps of it, in an order drawn anew; at
last it is timed how long each scheme takes to choose rows.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import mean
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

from cpr.priority import Prioritizer, PriorityConfig
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.training.build import start_process_group
from experiments.checkpointing.job import Job, start_training
from experiments.harness.training import Training
from experiments.tracking.run import CHOOSES, CONTENDERS, NONE, RARE, SCHEMES, TORCHREC, Pace


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one launch."""
    request = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    pace = Pace(**request["pace"])
    bench = Bench(start_training(Job(**request["job"]), ranks))
    bench.training.timed_steps(pace.warm_up_steps)
    orders = Random(request["job"]["seed"])
    measured: dict[str, Any] = {
        "rounds": [bench.round(order_of(number, pace, orders), pace) for number in range(pace.rounds)]
    }
    measured["choosing"] = {scheme: bench.choose(scheme, pace) for scheme in SCHEMES}
    dist.destroy_process_group()
    Path(request["out"]).write_text(json.dumps(measured))
    return 0


def order_of(number: int, pace: Pace, orders: Random) -> list[str]:
    """Who takes part in a round, in the order of their steps."""
    contenders = [name for name in CONTENDERS if number % pace.rare == 0 or name not in RARE]
    orders.shuffle(contenders)
    return contenders


class Bench:
    """One model in training, which is tracked in different ways in turn.

    Args:
        training: of it.
    """

    def __init__(self, training: Training) -> None:
        self.training: Final = training
        self._memory: Final[dict[str, Tensor]] = {}
        self._rival = ModelDeltaTrackerTrec(training.model)
        self._rivals_modules = list(self._rival.tracked_modules.values())
        self._listen_to_rival(False)
        self.num_rows: Final = sum(
            table.num_embeddings
            for module in self._rivals_modules
            for table in module._table_name_to_config.values()
        )
        for scheme in SCHEMES:  # touch all memory
            with self._prioritizer(scheme) as prioritizer:
                prioritizer.forget_all()

    def round(self, order: Sequence[str], pace: Pace) -> dict[str, float]:
        """Mean seconds of a step, by contender."""
        return {name: self._step_s(name, pace) for name in order}

    def choose(self, scheme: str, pace: Pace) -> dict[str, float]:
        """How long a scheme takes to choose rows, again and again, and what it keeps."""
        took_s = []
        with self._prioritizer(scheme) as prioritizer:
            for _ in range(CHOOSES):
                self.training.timed_steps(pace.steps)
                began = perf_counter()
                rows = prioritizer.rows_to_save()
                took_s.append(perf_counter() - began)
                prioritizer.take_back()
            return {
                "choose_s": sorted(took_s)[CHOOSES // 2],
                "rows": sum(ids.numel() for ids in rows.values()),
                "bytes_per_row": prioritizer.tracker_bytes / self.num_rows,
            }

    def _step_s(self, name: str, pace: Pace) -> float:
        with self._tracked(name) as after_step:
            took_s = []
            for step in range(1 + pace.steps):
                began = perf_counter()
                self.training.step()
                after_step()
                if step:  # the first prepares what is kept from batch to batch
                    took_s.append(perf_counter() - began)
        return mean(took_s)

    @contextmanager
    def _tracked(self, name: str) -> Iterator[Callable[[], None]]:
        """Track; gives what is to be called after each step."""
        if name == NONE:
            yield _nothing
        elif name == TORCHREC:
            self._listen_to_rival(True)
            yield self._rival.step
            self._listen_to_rival(False)
            self._rival.get_unique_ids()  # which makes it forget
        else:
            with self._prioritizer(name):
                yield _nothing

    def _prioritizer(self, scheme: str) -> Prioritizer:
        """One whose trackers go on where those of the one before were."""

        def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
            if name not in self._memory:
                self._memory[name] = torch.zeros(numel, dtype=dtype)
            return self._memory[name]

        config = PriorityConfig(scheme=scheme)  # type: ignore[arg-type]
        return Prioritizer(self.training.model, config, allocate=allocate)

    def _listen_to_rival(self, on: bool) -> None:
        for module in self._rivals_modules:
            module.post_lookup_tracker_fn = self._rival.record_lookup if on else None


def _nothing() -> None:
    return None


if __name__ == "__main__":
    raise SystemExit(main())
