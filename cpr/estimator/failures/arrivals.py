"""When failures arrive and whom they strike, for many simulated runs at once.

The unit of a draw is the mean, so that one distribution serves a job and each of its nodes: a node fails
`num_nodes` times as rarely as the job. Both clocks go on while a run saves or recovers: machines do not wait.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]

Distribution = Literal["exponential", "gamma", "weibull", "recorded"]
Scope = Literal["job", "node"]
SHAPES: Final = (0.1, 100.0)
"""Shape parameters that can be drawn from; outside of it failures are one instant or a metronome."""
AHEAD: Final = 64
"""How many failures of a run `NodeClock` looks ahead: few passes over the nodes, little to remember."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """How failures come; how often is the job's mean time to failure."""

    distribution: Distribution = "exponential"
    """Of the time between failures. `recorded`: those in `recorded_s`, drawn again with replacement."""
    shape: float = 1.0
    """Of gamma and Weibull: 1 is exponential, below 1 failures come in bursts, above 1 regularly."""
    recorded_s: tuple[float, ...] = ()
    """Times between failures as they were seen; stretched to the job's mean time to failure."""
    scope: Scope = "job"
    """`job`: one clock, set to 0 when the run begins and at each failure: what a log of a job's failures
    describes. `node`: a clock for each node. A run begins when its nodes are in the middle of their lives
    (the stationary process), and one that fails is replaced by a new one."""
    group_share: float = 0.0
    """Share of failures that take a group of neighbours, such as a rack, instead of one node."""
    group_nodes: int = 1
    """How many such a failure takes, the one whose clock rang included."""

    def __post_init__(self) -> None:
        if self.distribution not in _DRAWS and self.distribution != "recorded":
            choices = ", ".join([*_DRAWS, "recorded"])
            raise ValueError(f"distribution is {self.distribution!r}; choose one of {choices}")
        if self.scope not in {"job", "node"}:
            raise ValueError(f"scope is {self.scope!r}; failures are those of the 'job' or of each 'node'")
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
        """How many nodes a failure takes on average."""
        return 1 + self.group_share * (self.group_nodes - 1)

    def draw(self, random: np.random.Generator, size: int) -> Times:
        """So many times between failures, with mean 1."""
        if self.distribution == "recorded":
            recorded = np.asarray(self.recorded_s)
            return random.choice(recorded / recorded.mean(), size)
        return _DRAWS[self.distribution](random, self.shape, size)

    def draw_remaining(self, random: np.random.Generator, size: int) -> Times:
        """Times from a moment that knows nothing of the clocks to their next failure, in units of the mean.

        A moment falls into a time between failures with a chance in proportion to its length, and anywhere in
        it (renewal theory: the forward recurrence time of the stationary process).
        """
        if self.distribution == "recorded":
            recorded = np.asarray(self.recorded_s)
            met = random.choice(recorded / recorded.mean(), size, p=recorded / recorded.sum())
        else:
            met = _LENGTH_BIASED[self.distribution](random, self.shape, size)
        return random.random(size) * met


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
    """Seconds since the run's beginning."""
    node: Numbers
    """Whose clock rang."""
    num_nodes: Numbers
    """How many are struck: that one and those after it, which are its neighbours."""


class Clock(ABC):
    """The failures of many runs, one after the other.

    Args:
        model: of the failures.
        mean_s: of the time between failures of the job.
        num_nodes: of the job.
        num_runs: how many are simulated.
        seed: the same seed makes the same failures, whatever comes of them.
    """

    def __init__(
        self, model: FailureModel, mean_s: float, num_nodes: int, num_runs: int, seed: np.random.SeedSequence
    ) -> None:
        self._model, self._mean_s, self._num_nodes, self._num_runs = model, mean_s, num_nodes, num_runs
        self._random, self._group_random = map(np.random.default_rng, seed.spawn(2))

    def next(self) -> Failure:
        """Each run's next failure."""
        at_s, node = self._ring()
        is_group = self._group_random.random(self._num_runs) < self._model.group_share
        return Failure(at_s, node, np.where(is_group, self._model.group_nodes, 1))

    @abstractmethod
    def _ring(self) -> tuple[Times, Numbers]:
        """When, and whose clock, of each run."""


class JobClock(Clock):
    """One clock for each run; a failure strikes any node alike."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._now_s = np.zeros(self._num_runs)

    def _ring(self) -> tuple[Times, Numbers]:
        self._now_s = self._now_s + self._mean_s * self._model.draw(self._random, self._num_runs)
        return self._now_s, self._random.integers(self._num_nodes, size=self._num_runs)


class NodeClock(Clock):
    """One clock for each node of each run.

    It holds 8 bytes a node and run, and looks at all of them once for `AHEAD` failures of a run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window_s, self._node_mean_s = AHEAD * self._mean_s, self._num_nodes * self._mean_s
        first = self._model.draw_remaining(self._random, self._num_runs * self._num_nodes)
        self._rings_s = self._node_mean_s * first.reshape(self._num_runs, self._num_nodes)
        self._known_until_s = 0.0
        self._at_s = np.empty((self._num_runs, 0))  # known and not yet given, padded with infinity
        self._nodes = np.empty((self._num_runs, 0), np.int64)

    def _ring(self) -> tuple[Times, Numbers]:
        while self._at_s.shape[1] == 0 or np.isinf(self._at_s[:, 0]).any():
            self._look_ahead()
        at_s, nodes = self._at_s[:, 0], self._nodes[:, 0]
        self._at_s, self._nodes = self._at_s[:, 1:], self._nodes[:, 1:]
        return at_s, nodes

    def _look_ahead(self) -> None:
        """Learn all failures of one window more."""
        self._known_until_s += self._window_s
        runs, nodes = np.nonzero(self._rings_s < self._known_until_s)
        found = []
        while len(runs):
            at_s = self._rings_s[runs, nodes]
            found.append((runs, nodes, at_s))
            again_s = at_s + self._node_mean_s * self._model.draw(self._random, len(runs))
            self._rings_s[runs, nodes] = again_s
            in_window = again_s < self._known_until_s
            runs, nodes = runs[in_window], nodes[in_window]
        if found:
            self._remember(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _remember(self, runs: Numbers, nodes: Numbers, at_s: Times) -> None:
        """Lay failures in any order behind those known already."""
        order = np.lexsort((at_s, runs))
        counts = np.bincount(runs, minlength=len(self._rings_s))
        places = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        new_s = np.full((len(counts), counts.max()), np.inf)
        new_nodes = np.zeros(new_s.shape, np.int64)
        new_s[runs[order], places], new_nodes[runs[order], places] = at_s[order], nodes[order]
        all_s, all_nodes = np.hstack([self._at_s, new_s]), np.hstack([self._nodes, new_nodes])
        by_time = np.argsort(all_s, axis=1, kind="stable")
        self._at_s = np.take_along_axis(all_s, by_time, axis=1)
        self._nodes = np.take_along_axis(all_nodes, by_time, axis=1)
