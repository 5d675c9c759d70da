"""What an emulated run is: a job of 56 hours on 8 nodes, played through by one process in some seconds.

As in the CPR paper (section 3 of our notes on it) time is only counted: step i of n stands for hour 56 i / n.
The tables' rows are dealt out to logical nodes, an equal share of every table to each. When one fails, its
rows, and their optimizer state, come back from the last save, and training goes on: partial recovery. What
full recovery does to the model is nothing: the work since the save is done again on the same batches, and it
ends as the run without failures does (`tests/experiments/emulation/test_worker.py` shows it).

What makes it comparable, and honest:

- Everything of a seed is the same for all schemes: initial weights, order of the samples, hours of the
  failures and nodes that fail. A run with more failures, or more nodes a failure, has all those of another.
- The hours of failures are independent and uniform; their number is fixed, as in the paper.
- The first save is the state at step 0, before any training: what fails earlier than the first save that is
  due goes back to initial values.
- A save is there at once; a failure never meets one that is under way (`cpr simulate` studies those).
- A scheme with priority saves every ratio x T_save: of each large table that share of its rows, the small
  tables whole. Its PLS is counted as if everything was saved every T_save, like the paper's.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from cpr.estimator.planning.formulas import Job, interval_full, interval_partial
from cpr.priority.config import SCHEMES as PRIORITY_SCHEMES

HOURS: Final = 56.0
"""Of the job."""
NODES: Final = 8
MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
PRODUCTION: Final = Job(
    T_total=HOURS * HOUR_S,
    T_fail=HOURS * HOUR_S / 2,
    O_save=5.6 * MINUTE_S,
    O_load=5.4 * MINUTE_S,
    O_res=0.0,
    N_emb=NODES,
)
"""The job that is emulated: 56 h, 2 failures, 8 nodes. The paper's O_save, O_load and O_res are not known to
us: these are what its reported overheads on Criteo Kaggle lead back to, O_load holding O_res too."""

NO_FAILURE: Final = "none"
NAIVE: Final = "naive"
VANILLA: Final = "vanilla"
WHOLE: Final = (NAIVE, VANILLA)
"""Schemes that save all rows."""
PRIORITY: Final = PRIORITY_SCHEMES
"""Schemes that save some rows of the large tables, those of `cpr.priority`. `never` saves none of them, only
the small tables; `touched` saves all that changed, however many."""
SCHEMES: Final = (NO_FAILURE, *WHOLE, *PRIORITY)

FAILURE_HOURS: Final = 1
FAILED_NODES: Final = 2
"""Random streams of a seed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; everything that decides its end besides the data."""

    scheme: str
    """One of `SCHEMES`."""
    seed: int
    """Of the initial weights, the order of the samples, the failures and the random choices of a scheme."""
    network: str = "dlrm"
    """`dlrm` or `dcnv2`."""
    optimizer: str = "rowwise_adagrad"
    """Of the tables and, without the row-wise part, of the dense parameters."""
    failures: int = 2
    """In the whole job."""
    nodes_lost: int = 1
    """Nodes that each failure takes."""
    target_pls: float = 0.1
    """Decides the interval of every scheme but `naive`."""
    ratio: float = 0.125
    """Share of the rows that a save with priority takes."""
    sampling_period: int = 2
    """Of `ssu`: one of so many looked-up ids is offered to its list."""
    top_coverage: float | None = None
    """Skew of the ids: share of the accesses that the most popular percent of a table's ids gets. It asks for
    a variant of the default data set; None: the data set as it is."""

    def __post_init__(self) -> None:
        _check(self.scheme in SCHEMES, f"scheme is {self.scheme!r}; choose one of {', '.join(SCHEMES)}")
        _check(self.failures >= 0, "failures must not be negative")
        _check(1 <= self.nodes_lost <= NODES, f"nodes_lost must be from 1 to {NODES}")
        _check(0 < self.target_pls <= 1, "target_pls is a share, above 0 and at most 1")
        _check(0 < self.ratio <= 1, "ratio is a share, above 0 and at most 1")

    @property
    def name(self) -> str:
        """Short, and different for different runs: the scheme, what is not the default, the seed."""
        shown = [
            f"{field.name} {getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in {"scheme", "seed"} and getattr(self, field.name) != field.default
        ]
        return ", ".join([self.scheme, *shown, f"seed {self.seed}"])

    @property
    def without_failures(self) -> "Run":
        """The run that this one is compared with: the same seed, network, optimizer and data."""
        return Run(
            scheme=NO_FAILURE,
            seed=self.seed,
            network=self.network,
            optimizer=self.optimizer,
            top_coverage=self.top_coverage,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a row of a result holds them."""
        return asdict(self)

    @property
    def job(self) -> Job:
        """What the formulas take: failures as often as here, each believed to take one node."""
        return replace(PRODUCTION, T_fail=PRODUCTION.T_total / max(1, self.failures))

    @property
    def interval_h(self) -> float:
        """T_save: hours between two saves of everything; for schemes with priority, as if."""
        if self.scheme == NAIVE:
            return interval_full(self.job) / HOUR_S
        return interval_partial(self.job, self.target_pls) / HOUR_S

    @property
    def save_every_h(self) -> float:
        """Hours between two saves."""
        return self.interval_h * (self.ratio if self.scheme in PRIORITY else 1)


@dataclass(frozen=True, order=True)
class Event:
    """Something that happens between two steps."""

    hour: float
    nodes: tuple[int, ...] = ()
    """That fail; empty: a save."""


def events_of(run: Run) -> list[Event]:
    """Saves and failures in order of time, without the save at hour 0."""
    if run.scheme == NO_FAILURE:
        return []
    return sorted([*_saves(run), *_failures(run)])


def _saves(run: Run) -> Iterator[Event]:
    for number in range(1, math.ceil(HOURS / run.save_every_h)):
        yield Event(number * run.save_every_h)


def _failures(run: Run) -> Iterator[Event]:
    hours = np.random.default_rng([FAILURE_HOURS, run.seed])
    nodes = np.random.default_rng([FAILED_NODES, run.seed])
    for _ in range(run.failures):
        failed = nodes.permutation(NODES)[: run.nodes_lost]
        yield Event(float(hours.uniform(0, HOURS)), tuple(sorted(failed.tolist())))


def step_at(hour: float, num_steps: int) -> int:
    """Steps that are done at an hour."""
    return min(num_steps, int(hour / HOURS * num_steps + 1e-9))  # hours are multiples, rounded a little


def step_saved(run: Run, hour: float, num_steps: int) -> int:
    """Steps whose work counts as saved at an hour: those before the last multiple of T_save."""
    return step_at(math.floor(hour / run.interval_h + 1e-9) * run.interval_h, num_steps)


def rows_of_node(node: int, num_rows: int) -> tuple[int, int]:
    """First row of a table that is a node's, and the one after its last; of small tables some have none."""
    return node * num_rows // NODES, (node + 1) * num_rows // NODES


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)
