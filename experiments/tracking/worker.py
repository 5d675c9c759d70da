"""Worker of one launch of `experiments.tracking`.

The worker trains one model all the time. In each round every tracker gets a few of its steps, in a new random
order. At the end, the worker times the choice of rows by each scheme.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import mean
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

from cpr.priority import Prioritizer, PriorityConfig
from cpr.priority.frequency import MOST, SURE
from cpr.shards.lookups import Lookups
from experiments.checkpointing.job import TrainingJob, start_training
from experiments.harness.training import Training
from experiments.harness.worker_process import job_from, worker_process_group, write_measured
from experiments.tracking.run import (
    CALLED,
    CHOOSES,
    CONTENDERS,
    MFU,
    MFU_ALL,
    NONE,
    RARE,
    SCHEMES,
    TORCHREC,
    Rounds,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one launch."""
    job = job_from(arguments)
    pace, orders = Rounds(**job["pace"]), Random(job["job"]["seed"])
    with worker_process_group() as ranks:
        bench = TrackerBench(start_training(TrainingJob(**job["job"]), ranks))
        bench.training.timed_steps(pace.warm_up_steps)
        measured: dict[str, Any] = {
            "rounds": [bench.round(order_of(number, pace, orders), pace) for number in range(pace.rounds)]
        }
        measured["calls"] = {name: bench.calls_share(name) for name in CALLED}
        measured["choosing"] = {scheme: bench.choose(scheme, pace) for scheme in SCHEMES}
    write_measured(job, ranks, measured)
    return 0


def order_of(number: int, pace: Rounds, orders: Random) -> list[str]:
    """Contenders of a round, in the order of their steps."""
    contenders = [name for name in CONTENDERS if number % pace.rare == 0 or name not in RARE]
    orders.shuffle(contenders)
    return contenders


class TimedPrioritizer(Prioritizer):
    """Counts the time of what training calls in each step."""

    calls_s = 0.0

    def _see(self, number: int, lookups: Lookups) -> None:
        began = perf_counter()
        super()._see(number, lookups)
        self.calls_s += perf_counter() - began

    def _wants_pass(self, number: int) -> bool:
        began = perf_counter()
        found = super()._wants_pass(number)
        self.calls_s += perf_counter() - began
        return found


class TrackerBench:
    """One model in training, with a different tracker in turn.

    Args:
        training: of the model.
    """

    def __init__(self, training: Training) -> None:
        self.training: Final = training
        self._memory: Final[dict[tuple[str, str], Tensor]] = {}
        self._states: Final[dict[str, dict[str, Any]]] = {}
        self._calls_s: Final = defaultdict[str, float](float)
        self._steps_s: Final = defaultdict[str, float](float)
        self._rival = ModelDeltaTrackerTrec(training.model)
        self._rivals_modules = list(self._rival.tracked_modules.values())
        self._listen_to_rival(False)
        self.num_rows: Final = sum(
            table.num_embeddings
            for module in self._rivals_modules
            for table in module._table_name_to_config.values()
        )
        for name in (*SCHEMES, MFU_ALL):  # touch all memory, which is slow at first use
            with self._prioritizer(name) as prioritizer:
                prioritizer.forget_all()
        for tracker in self._states[MFU]["trackers"].values():  # as after a choice of rows used so often
            tracker["least"] = [MOST * SURE] * len(tracker["least"])

    def round(self, order: Sequence[str], pace: Rounds) -> dict[str, float]:
        """Mean seconds of a step, by contender."""
        return {name: self._step_s(name, pace) for name in order}

    def calls_share(self, name: str) -> float:
        """Time of a tracker's calls in the steps of all rounds, over that of the steps."""
        return self._calls_s[name] / self._steps_s[name]

    def choose(self, scheme: str, pace: Rounds) -> dict[str, float]:
        """Time repeated choices of rows by a scheme, and measure its memory."""
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

    def _step_s(self, name: str, pace: Rounds) -> float:
        with self._tracked(name) as (prioritizer, after_step):
            took_s = []
            for step in range(1 + pace.steps):
                if step == 1 and prioritizer is not None:
                    prioritizer.calls_s = 0.0
                began = perf_counter()
                self.training.step()
                after_step()
                if step:  # the first step fills the buffers of the tracker
                    took_s.append(perf_counter() - began)
            if prioritizer is not None:
                self._calls_s[name] += prioritizer.calls_s
                self._steps_s[name] += sum(took_s)
        return mean(took_s)

    @contextmanager
    def _tracked(self, name: str) -> Iterator[tuple[TimedPrioritizer | None, Callable[[], None]]]:
        """Track within the block; yields what tracks, if it is ours, and what to call after each step."""
        if name == NONE:
            yield None, _nothing
        elif name == TORCHREC:
            self._listen_to_rival(True)
            yield None, self._rival.step
            self._listen_to_rival(False)
            self._rival.get_unique_ids()  # reading the ids clears them
        else:
            with self._prioritizer(name) as prioritizer:
                yield prioritizer, _nothing

    @contextmanager
    def _prioritizer(self, contender: str) -> Iterator[TimedPrioritizer]:
        """A prioritizer that continues with the memory and the state of the contender's last one."""

        def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
            if (contender, name) not in self._memory:
                self._memory[contender, name] = torch.zeros(numel, dtype=dtype)
            return self._memory[contender, name]

        scheme = MFU if contender == MFU_ALL else contender
        config = PriorityConfig(scheme=scheme)  # type: ignore[arg-type]
        with TimedPrioritizer(self.training.model, config, allocate=allocate) as prioritizer:
            if contender in self._states:
                prioritizer.load_state_dict(self._states[contender])
            yield prioritizer
            self._states[contender] = prioritizer.state_dict()

    def _listen_to_rival(self, on: bool) -> None:
        for module in self._rivals_modules:
            module.post_lookup_tracker_fn = self._rival.record_lookup if on else None


def _nothing() -> None:
    return None


if __name__ == "__main__":
    raise SystemExit(main())
