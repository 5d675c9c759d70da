"""Arrival times and struck nodes of failures, drawn for many simulated runs at once.

Draws have mean 1, so that one distribution serves a job and each of its nodes: a node fails `num_nodes` times
as rarely as the job. Clocks keep running while a run saves or recovers, as real machines do.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpr.fields import check_fields

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]

Distribution = Literal["exponential", "gamma", "weibull", "recorded"]
Scope = Literal["job", "node"]
SHAPES: Final = (0.1, 100.0)
"""Allowed shape parameters; outside of this range all failures coincide, or are exactly periodic."""
AHEAD: Final = 64
"""Failures per run that `NodeClock` computes at a time: few passes over the nodes at little memory."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Distribution of failures in time and over nodes; their rate is the job's mean time to failure."""

    distribution: Distribution = "exponential"
    """Of the time between failures. `recorded`: the times in `recorded_s`, drawn with replacement."""
    shape: float = 1.0
    """Of gamma and Weibull: 1 is exponential, below 1 failures come in bursts, above 1 regularly."""
    recorded_s: tuple[float, ...] = ()
    """Observed times between failures, scaled to the job's mean time to failure."""
    scope: Scope = "job"
    """`job`: one clock, reset when the run begins and at each failure, as in the log of a job's failures.
    `node`: one clock per node. A run begins in the middle of its nodes' lives (the stationary process), and
    a failed node is replaced by a new one."""
    group_share: float = 0.0
    """Share of failures that take a group of neighbours, such as a rack, instead of one node."""
    group_nodes: int = 1
    """Nodes lost by such a failure, including the failing node itself."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not SHAPES[0] <= self.shape <= SHAPES[1]:
            raise ValueError(f"shape is {self.shape:g}; it must be from {SHAPES[0]:g} to {SHAPES[1]:g}")
        if (self.distribution == "recorded") != bool(self.recorded_s):
            raise ValueError("recorded_s and distribution='recorded' belong together: give both or neither")
        if not all(0 < time < math.inf for time in self.recorded_s):
            raise ValueError("recorded times between failures must be positive; two failures at one moment "
                             "are one failure of several nodes (group_share, group_nodes)")  # fmt: skip
        if not 0 <= self.group_share <= 1:
            raise ValueError(f"group_share is {self.group_share:g}; it is a share, from 0 to 1")
        if self.group_nodes < 1:
            raise ValueError(f"group_nodes is {self.group_nodes}; a failure takes 1 node at least")

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes lost by a failure."""
        return 1 + self.group_share * (self.group_nodes - 1)

    def draw(self, random: np.random.Generator, size: int) -> Times:
        """Draw `size` times between failures, with mean 1."""
        if self.distribution == "recorded":
            recorded = np.asarray(self.recorded_s)
            return random.choice(recorded / recorded.mean(), size)
        return _DRAWS[self.distribution](random, self.shape, size)

    def draw_remaining(self, random: np.random.Generator, size: int) -> Times:
        """Draw times from an arbitrary moment to the next failure, in units of the mean.

        The moment falls into a gap with a probability proportional to the gap's length, and uniformly inside
        it (renewal theory: the forward recurrence time of the stationary process).
        """
        if self.distribution == "recorded":
            recorded = np.asarray(self.recorded_s)
            gaps = random.choice(recorded / recorded.mean(), size, p=recorded / recorded.sum())
        else:
            gaps = _LENGTH_BIASED[self.distribution](random, self.shape, size)
        return random.random(size) * gaps


Draw = Callable[[np.random.Generator, float, int], Times]
_DRAWS: Final[dict[str, Draw]] = {
    "exponential": lambda random, _shape, size: random.standard_exponential(size),
    "gamma": lambda random, shape, size: random.standard_gamma(shape, size) / shape,
    "weibull": lambda random, shape, size: random.weibull(shape, size) / math.gamma(1 + 1 / shape),
}
_LENGTH_BIASED: Final[dict[str, Draw]] = {  # density x f(x) instead of f(x)
    "exponential": lambda random, _shape, size: random.standard_gamma(2, size),
    "gamma": lambda random, shape, size: random.standard_gamma(shape + 1, size) / shape,
    "weibull": lambda random, shape, size: (
        random.standard_gamma(1 + 1 / shape, size) ** (1 / shape) / math.gamma(1 + 1 / shape)
    ),
}


@dataclass(frozen=True)
class Failure:
    """The next failure of each of many runs; arrays [runs]."""

    at_s: Times
    """Seconds since the start of the run."""
    node: Numbers
    """First failing node."""
    num_nodes: Numbers
    """Number of failing nodes: `node` and its neighbours with the next higher numbers."""


class Clock(ABC):
    """Generator of the failures of many runs of a job, one after the other.

    `mean_s` is the job's mean time between failures. The same seed makes the same failures, whatever their
    consequences.
    """

    def __init__(
        self, model: FailureModel, mean_s: float, num_nodes: int, num_runs: int, seed: np.random.SeedSequence
    ) -> None:
        self._model, self._mean_s, self._num_nodes, self._num_runs = model, mean_s, num_nodes, num_runs
        # separate generators: group failures must not change the times of the others
        self._random, self._group_random = map(np.random.default_rng, seed.spawn(2))

    def next(self) -> Failure:
        """Draw each run's next failure."""
        at_s, node = self._next()
        is_group = self._group_random.random(self._num_runs) < self._model.group_share
        return Failure(at_s, node, np.where(is_group, self._model.group_nodes, 1))

    @abstractmethod
    def _next(self) -> tuple[Times, Numbers]:
        """Time and node of each run's next failure."""


class JobClock(Clock):
    """One clock per run; a failure strikes all nodes with equal probability."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._now_s = np.zeros(self._num_runs)

    def _next(self) -> tuple[Times, Numbers]:
        self._now_s = self._now_s + self._mean_s * self._model.draw(self._random, self._num_runs)
        return self._now_s, self._random.integers(self._num_nodes, size=self._num_runs)


class NodeClock(Clock):
    """One clock per node of each run, with 8 bytes of state each, computed `AHEAD` failures at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window_s, self._node_mean_s = AHEAD * self._mean_s, self._num_nodes * self._mean_s
        first = self._model.draw_remaining(self._random, self._num_runs * self._num_nodes)
        self._next_s = self._node_mean_s * first.reshape(self._num_runs, self._num_nodes)
        self._known_until_s = 0.0
        self._at_s = np.empty((self._num_runs, 0))  # computed, not yet returned, padded with infinity
        self._nodes = np.empty((self._num_runs, 0), np.int64)

    def _next(self) -> tuple[Times, Numbers]:
        while self._at_s.shape[1] == 0 or np.isinf(self._at_s[:, 0]).any():
            self._compute_window()
        at_s, nodes = self._at_s[:, 0], self._nodes[:, 0]
        self._at_s, self._nodes = self._at_s[:, 1:], self._nodes[:, 1:]
        return at_s, nodes

    def _compute_window(self) -> None:
        """Compute all failures of the next window."""
        self._known_until_s += self._window_s
        # a failed node may fail again within the window: repeat until no clock is left inside
        runs, nodes = np.nonzero(self._next_s < self._known_until_s)
        found = []
        while len(runs):
            at_s = self._next_s[runs, nodes]
            found.append((runs, nodes, at_s))
            again_s = at_s + self._node_mean_s * self._model.draw(self._random, len(runs))
            self._next_s[runs, nodes] = again_s
            in_window = again_s < self._known_until_s
            runs, nodes = runs[in_window], nodes[in_window]
        if found:
            self._merge(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _merge(self, runs: Numbers, nodes: Numbers, at_s: Times) -> None:
        """Merge new failures, in any order, into the sorted failures of each run."""
        order = np.lexsort((at_s, runs))
        counts = np.bincount(runs, minlength=len(self._next_s))
        places = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        new_s = np.full((len(counts), counts.max()), np.inf)
        new_nodes = np.zeros(new_s.shape, np.int64)
        new_s[runs[order], places], new_nodes[runs[order], places] = at_s[order], nodes[order]
        all_s, all_nodes = np.hstack([self._at_s, new_s]), np.hstack([self._nodes, new_nodes])
        by_time = np.argsort(all_s, axis=1, kind="stable")
        self._at_s = np.take_along_axis(all_s, by_time, axis=1)
        self._nodes = np.take_along_axis(all_nodes, by_time, axis=1)
