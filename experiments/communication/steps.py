"""Times the contenders of `experiments.communication` in turns on a dense part, and counts their bytes."""

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch.distributed as dist

from dlrm.comm.autotune import tuner as automatic
from dlrm.comm.stats import ExchangeFigures
from dlrm.launch.device import Ranks
from experiments.communication.contenders import AUTO, BASELINE, CHOSEN, CONTENDERS, is_comparable, still_in
from experiments.communication.models import MODELS, DensePart, Samples, num_dense, samples
from experiments.communication.ways import ContenderStep, make_step
from experiments.harness.turns import Effort, Rounds, seconds_and_bytes_of, take_turns


class StepTimer:
    """Contenders, by name, that take turns on one of `MODELS`; all ranks make the same calls."""

    def __init__(self, model: str, names: Sequence[str], ranks: Ranks) -> None:
        self.model = model
        shape = MODELS[model]
        self._part = DensePart(shape)
        self._samples: Iterator[Samples] = cycle(samples(shape, ranks))
        self._steps = shape.steps
        # untimed steps, since other contenders have used the caches, which hold no large gradient anyway
        self._steps_before = 0 if shape.is_large else 1
        self._ways: dict[str, ContenderStep] = {}
        self._chosen = BASELINE  # until `choose` has been called
        for name in names:
            self._add(name)

    def choose(self, is_final: bool) -> dict[str, Any]:
        """Train with `auto` at the current link speed until its choice is final, or until its first choice.

        Returns:
            `chosen`: the contender with the exchange of that choice; `plan`: the log of `auto`;
            `settled_at_step`: the step after which it was made.
        """
        way = make_step(AUTO, self._part, self._steps)
        assert way.replicas is not None, "auto is an exchange of this project"
        steps = 0
        with _captured_log() as lines:
            exchange = way.replicas.exchange
            while not (exchange.is_settled if is_final else exchange.chosen):  # alike on all ranks
                way.step(next(self._samples))
                steps += 1
        assert exchange.chosen is not None, "auto has settled"
        self._chosen = CHOSEN[exchange.chosen]
        del way, exchange
        gc.collect()  # its trials hold reference cycles, and may be as large as the model
        return {"chosen": self._chosen, "plan": "\n".join(lines), "settled_at_step": steps}

    def time(self, effort: Effort) -> dict[str, Any]:
        """Time all contenders, including the choice of `auto`, at the current link speed.

        Returns:
            `rounds`: seconds of a step by contender; `link_bytes`: counted bytes that left the busiest node
            in a step; `formula_bytes`: mean bytes that a rank sends with the exchanges of this project,
            without TCP's overhead; `num_values`: of a gradient.
        """
        if self._chosen not in self._ways:
            self._add(self._chosen)
        self._take_figures()  # discards those of earlier rounds
        counted: dict[str, list[float]] = {name: [] for name in self._ways}

        def remaining(rounds: Rounds, elapsed_s: float) -> Iterable[str]:
            if len(rounds) < effort.full_rounds:
                return self._ways
            others = {*filter(is_comparable, rounds[-1])} - {self._chosen}
            is_over = effort.is_enough(rounds, elapsed_s, self._chosen, others)
            return () if is_over else still_in(rounds, self._chosen)

        measured = take_turns(self._ways, partial(self._turn, counted=counted), remaining, effort.full_rounds)
        return {
            "rounds": measured,
            "link_bytes": _of_busiest(counted),
            "formula_bytes": {name: figures.sent_bytes for name, figures in self._take_figures().items()},
            "num_values": num_dense(self._part),
        }

    def _add(self, name: str) -> None:
        way = make_step(CONTENDERS[name], self._part, self._steps)
        self._steps_of(way, way.warm_up_steps)
        self._ways[name] = way

    def _take_figures(self) -> dict[str, ExchangeFigures]:
        """Figures since the last call of the contenders of this project that have made a step."""
        taken = {
            name: way.replicas.take_figures() for name, way in self._ways.items() if way.replicas is not None
        }
        return {name: figures for name, figures in taken.items() if figures is not None}

    def _turn(self, name: str, counted: dict[str, list[float]]) -> float:
        """Make one turn of a contender and count its bytes per step; returns the seconds of a step."""
        way = self._ways[name]
        self._steps_of(way, self._steps_before)
        took_s, sent = seconds_and_bytes_of(partial(self._steps_of, way, way.steps))
        counted[name].append(sent / way.steps)
        return took_s / way.steps

    def _steps_of(self, way: ContenderStep, steps: int) -> None:
        for _ in range(steps):
            way.step(next(self._samples))
        way.drain()


def _of_busiest(counted: dict[str, list[float]]) -> dict[str, float]:
    """Median over turns of the bytes of the busiest node."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, counted)
    return {name: max(median(each[name]) for each in every) for name in counted}


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collect the log messages of `auto` within the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(automatic.__name__)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
