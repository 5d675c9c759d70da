"""Monte Carlo simulation of the costs of failures, without the approximations of formulas 3 to 5.

The rules are in `cpr.estimator.simulation.trials`; failures come from any `FailureModel`. All simulated saves
are full saves: priority saves write the same bytes in smaller pieces, at the same total cost, and the PLS
counts them as if whole tables were saved.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from tqdm import tqdm

from cpr.estimator.failures.arrivals import FailureModel, JobClock, NodeClock, Times
from cpr.estimator.planning.formulas import Job, check_interval
from cpr.estimator.planning.mirror import MirrorModel
from cpr.estimator.simulation.trials import MirrorRuns, PartialRuns, Runs
from cpr.fields import check_fields

Recovery = Literal["full", "partial", "mirror"]
PARTS: Final = ("save", "lost", "load", "reschedule")
NODES_AT_ONCE: Final = 4_000_000
"""Nodes of all runs simulated at the same time: some 200 MB."""
MOST_NODES: Final = 1_000_000
"""Limit of the nodes of a job."""
MOST_TRIALS: Final = 1_000_000
CONFIDENCE: Final = 0.95
MOST_FAILURES: Final = 10_000
"""Limit of the expected failures in the useful time of a job, which take half a minute to simulate."""


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % confidence interval (Student's t)."""

    value: float
    half_width: float
    """The interval is `value` plus and minus this."""

    @classmethod
    def of(cls, values: ArrayLike) -> Self:
        """The mean of at least two independent values.

        >>> mean = Mean.of([1.0, 2.0, 3.0])
        >>> f"{mean.value:.2f} +- {mean.half_width:.2f}"
        '2.00 +- 2.48'
        """
        numbers = np.asarray(values, np.float64)
        error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1))
        return cls(float(numbers.mean()), quantile * error)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {"mean": self.value, "half_width_95": self.half_width}


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Configuration of a simulation of many runs of one job with one recovery."""

    job: Job
    recovery: Recovery
    interval_s: float
    """Training time between two saves."""
    failures: FailureModel = field(default_factory=FailureModel)
    mirror: MirrorModel | None = None
    """Of partial recovery with mirrors, `recovery="mirror"`."""
    num_trials: int = 1000
    seed: int = 0
    """The same seed makes the same failures for all recoveries and intervals."""
    give_up: float = 10.0
    """A run ends unfinished after this multiple of the job's useful time, since it may never end."""

    def __post_init__(self) -> None:
        job, failures = self.job, self.failures
        check_fields(self)
        if (self.recovery == "mirror") != (self.mirror is not None):
            raise ValueError("recovery='mirror' and a mirror belong together: give both or neither")
        if self.mirror is not None and job.N_emb < 2:
            raise ValueError("a mirror needs another node to be on, and N_emb is 1")
        check_interval(job, self.interval_s)
        shortest_s = job.delay if self.recovery == "full" else job.shortest_partial
        if self.interval_s < shortest_s:
            raise ValueError(
                f"saving all rows takes {shortest_s:g} s in the background, but the next save is due after "
                f"{self.interval_s:g} s: storage cannot take them; choose a longer interval"
            )
        if job.N_emb > MOST_NODES:
            raise ValueError(
                f"N_emb is {job.N_emb:,}; {MOST_NODES:,} nodes can be simulated at most: each has a place in "
                "memory, and formulas do without"
            )
        if failures.group_nodes > job.N_emb:
            raise ValueError(
                f"failures of {failures.group_nodes} nodes cannot happen to {job.N_emb}; lower group_nodes"
            )
        if job.nodes_lost > 1 and not math.isclose(job.nodes_lost, failures.mean_nodes):
            raise ValueError(
                f"nodes_lost is {job.nodes_lost:g}, but failures take {failures.mean_nodes:g} nodes: "
                "say with group_share and group_nodes how nodes fail together"
            )
        if self.num_trials < 2:
            raise ValueError(f"num_trials is {self.num_trials}; a confidence interval needs 2 at least")
        if self.num_trials > MOST_TRIALS:
            raise ValueError(
                f"num_trials is {self.num_trials:,}; {MOST_TRIALS:,} can be simulated at most, whose mean is "
                "known to 0.2% of how much runs differ"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")
        if not 1 < self.give_up < math.inf:
            raise ValueError(
                f"give_up is {self.give_up:g}; a run takes longer than its job: give more than 1"
            )
        if job.T_total > MOST_FAILURES * job.T_fail:
            raise ValueError(
                f"T_fail is {job.T_fail:g} s, with {job.T_total / job.T_fail:,.0f} failures in the useful "
                f"time; {MOST_FAILURES:,} can be simulated, and such a job hardly comes to its end"
            )

    @property
    def expected_job(self) -> Job:
        """The job for which the formulas predict the simulation."""
        return replace(self.job, nodes_lost=min(1.0, self.job.nodes_lost) * self.failures.mean_nodes)

    @property
    def stretch(self) -> float:
        """Factor by which mirrors make training longer."""
        return 1.0 if self.mirror is None else 1 + self.mirror.slow_share

    @property
    def simulated_job(self) -> Job:
        """The job with the cost and delay of this recovery's saves in place of those of full saves."""
        job = replace(self.job, T_total=self.job.T_total * self.stretch)
        if self.recovery == "full" or job.O_rows is None:
            return job
        cost_s = job.O_blocked_partial
        return replace(job, O_save=cost_s + job.delay_partial, blocked_save=cost_s, O_rows=None)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Mean costs of the runs of one configuration. Overheads are shares of the job's useful time."""

    config: SimulationConfig
    parts: dict[str, Mean]
    """Overhead by part: `save` (which includes a mirror), `lost`, `load`, `reschedule`."""
    overhead: Mean
    """Total; a lower bound if not all runs finished."""
    overheads: Times
    """Total overhead of each run, float64 [num_trials]."""
    pls: Mean
    failures: Mean
    """Failures per run."""
    finished_share: float
    """Share of the runs that finished."""

    def worst(self, share: float) -> float:
        """The overhead that this share of the runs reaches or exceeds."""
        return float(np.quantile(self.overheads, 1 - share))

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values, without the single runs."""
        return {
            "recovery": self.config.recovery,
            "interval_s": self.config.interval_s,
            "overhead": self.overhead.to_json(),
            "parts": {name: mean.to_json() for name, mean in self.parts.items()},
            "overhead_worst_5_percent": self.worst(0.05),
            "pls": self.pls.to_json(),
            "failures": self.failures.to_json(),
            "finished_share": self.finished_share,
        }


def simulate(config: SimulationConfig) -> Simulation:
    """Simulate the runs of a configuration."""
    # memory is proportional to runs x nodes: jobs with many nodes are simulated in batches of runs
    at_once = max(1, min(config.num_trials, NODES_AT_ONCE // config.job.N_emb))
    sizes = [min(at_once, config.num_trials - begin) for begin in range(0, config.num_trials, at_once)]
    seeds = np.random.SeedSequence(config.seed).spawn(len(sizes))
    with tqdm(
        total=config.num_trials, unit="run", desc=config.recovery, disable=None, leave=False, delay=1
    ) as bar:
        batches = []
        for size, seed in zip(sizes, seeds, strict=True):
            batches.append(_simulate_some(config, size, seed))
            bar.update(size)
    return _summary(config, batches)


def _simulate_some(config: SimulationConfig, num_runs: int, seed: np.random.SeedSequence) -> Runs:
    """Simulate some of the runs at the same time."""
    job = config.simulated_job
    clock = JobClock if config.failures.scope == "job" else NodeClock
    arguments = (job, config.interval_s * config.stretch, config.give_up * job.T_total, num_runs)
    if config.mirror is not None:
        runs: Runs = MirrorRuns(*arguments, config.mirror)
    else:
        runs = (PartialRuns if config.recovery == "partial" else Runs)(*arguments)
    return runs.run(clock(config.failures, job.T_fail, job.N_emb, num_runs, seed))


def _summary(config: SimulationConfig, batches: list[Runs]) -> Simulation:
    def column(name: str) -> Times:
        return np.concatenate([getattr(each, name) for each in batches])

    costs = {part: column(f"{part}_s") / config.job.T_total for part in PARTS}
    costs["save"] += config.stretch - 1
    overheads = np.sum(list(costs.values()), axis=0)
    return Simulation(
        config=config,
        parts={part: Mean.of(values) for part, values in costs.items()},
        overhead=Mean.of(overheads),
        overheads=overheads,
        pls=Mean.of(column("pls")),
        failures=Mean.of(column("failures")),
        finished_share=float(column("finished").mean()),
    )
