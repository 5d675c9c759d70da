"""Contenders of `experiments.communication` take turns on a dense part, in its workers: seconds and bytes."""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

import torch.distributed as dist

from dlrm.comm import automatic
from dlrm.comm.figures import ExchangeFigures
from dlrm.inputs import Ranks
from experiments.communication_contenders import (
    AUTO,
    BASELINE,
    CHOSEN,
    CONTENDERS,
    LIMIT,
    is_comparable,
)
from experiments.communication_models import MODELS, DensePart, Samples, num_dense, samples
from experiments.communication_ways import Way, make_way
from experiments.network import sent_bytes

STAYS_WITHIN: Final = 1.2
"""Times the fastest: what takes longer takes no further turns."""
TOLD: Final = 2
"""Lines of the log until `auto` has chosen: what it tries, and what came of it."""
PLANNED_STEPS: Final = 5
"""Between looks at the log."""

Decision = TypeVar("Decision")


class Contest:
    """Contenders that take turns in one process group; all ranks make the same calls.

    Args:
        model: one of `communication_models.MODELS`.
        names: of contenders.
        ranks: this process and the others.
    """

    def __init__(self, model: str, names: Sequence[str], ranks: Ranks) -> None:
        shape = MODELS[model]
        self._part = DensePart(shape)
        self._samples: Iterator[Samples] = cycle(samples(shape, ranks))
        self._steps = shape.steps
        # that do not count, as they find in the caches what others left there; they hold no large gradient
        self._steps_before = 0 if shape.is_large else 1
        self._ways: dict[str, Way] = {}
        for name in names:
            self._add(name)

    def time(self, rounds: Sequence[int], cell_s: float) -> dict[str, Any]:
        """On the links as they are now.

        Args:
            rounds: of all contenders, and at most, of those that are close.
            cell_s: after which no further round begins.

        Returns:
            `chosen` by `auto`: a contender's name, and `plan`, why; `rounds`: seconds of a step by contender;
            `link_bytes`, counted, that left the busiest node in a step; `formula_bytes` of our contenders:
            what a rank sends, on average, without what TCP adds; `num_values` of a gradient.
        """
        chosen, why = self._plan()
        if chosen not in self._ways:
            self._add(chosen)
        self._take_figures()  # of what went before
        measured, counted = self._rounds(chosen, rounds, cell_s)
        return {
            "chosen": chosen,
            "plan": why,
            "rounds": measured,
            "link_bytes": _of_busiest(counted),
            "formula_bytes": {name: figures.sent_bytes for name, figures in self._take_figures().items()},
            "num_values": num_dense(self._part),
        }

    def _plan(self) -> tuple[str, str]:
        """Of `auto`: the contender that is what it chooses after trying out others, and its reasons."""
        way = make_way(AUTO, self._part, self._steps)
        assert way.replicas is not None, "it is one of ours"
        with _told() as lines:
            while not _agreed(len(lines) == TOLD):
                for _ in range(PLANNED_STEPS):
                    way.step(next(self._samples))
        figures = way.replicas.take_figures()
        assert figures is not None, "it has made steps"
        return CHOSEN[figures.name], "\n".join(lines)

    def _add(self, name: str) -> None:
        way = make_way(CONTENDERS[name], self._part, self._steps)
        for _ in range(way.warm_up_steps):
            way.step(next(self._samples))
        way.drain()
        self._ways[name] = way

    def _take_figures(self) -> dict[str, ExchangeFigures]:
        """Of our contenders, since this was last asked; of those that have made a step."""
        taken = {
            name: way.replicas.take_figures() for name, way in self._ways.items() if way.replicas is not None
        }
        return {name: figures for name, figures in taken.items() if figures is not None}

    def _rounds(
        self, chosen: str, rounds: Sequence[int], cell_s: float
    ) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
        """Seconds of each round, and bytes; in a new order each time, on all ranks alike."""
        full, most = rounds
        shuffled, began = random.Random(0), perf_counter()
        measured: list[dict[str, float]] = []
        counted: dict[str, list[float]] = {name: [] for name in self._ways}
        names = sorted(self._ways)
        while names:
            shuffled.shuffle(names)
            measured.append({})
            for name in names:
                measured[-1][name], sent = self._turn(name)
                counted[name].append(sent)
            late = perf_counter() - began > cell_s or len(measured) == most
            if len(measured) >= full:
                names = _agreed([] if late else still_in(measured, {BASELINE, LIMIT, chosen}))
        return measured, counted

    def _turn(self, name: str) -> tuple[float, float]:
        """Seconds and bytes of a step."""
        way = self._ways[name]
        for _ in range(self._steps_before):
            way.step(next(self._samples))
        way.drain()
        dist.barrier()
        began, sent = perf_counter(), sent_bytes()
        for _ in range(way.steps):
            way.step(next(self._samples))
        way.drain()
        dist.barrier()
        return (perf_counter() - began) / way.steps, (sent_bytes() - sent) / way.steps


def still_in(rounds: Sequence[dict[str, float]], always: set[str]) -> list[str]:
    """Who takes another turn: who always does, and comparable contenders about as fast as the best.

    Args:
        rounds: seconds by contender.
        always: names that stay.
    """
    typical = {name: median(each[name] for each in rounds if name in each) for name in rounds[0]}
    comparable = {name: seconds for name, seconds in typical.items() if is_comparable(name)}
    limit = STAYS_WITHIN * min(comparable.values())
    close = {name for name, seconds in comparable.items() if seconds <= limit and name in rounds[-1]}
    return sorted(always | close)


def _agreed(decision: Decision) -> Decision:
    """That of rank 0, which alone may look at the clock, and is told what `auto` thinks."""
    held: list[Any] = [decision]
    dist.broadcast_object_list(held)
    agreed: Decision = held[0]
    return agreed


def _of_busiest(counted: dict[str, list[float]]) -> dict[str, float]:
    """Median over turns of the bytes of the node that sends most."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, counted)
    return {name: max(median(each[name]) for each in every) for name in counted}


@contextmanager
def _told() -> Iterator[list[str]]:
    """What `auto` says meanwhile."""
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
