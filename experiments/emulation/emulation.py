"""An emulated run: a job of 56 hours on 8 nodes with failures, trained by one process in some seconds.

As in the CPR paper, time is only counted: step i of n stands for hour 56 i / n. Each logical node has an
equal share of every table's rows. When a node fails, its rows and their optimizer state come back from the
last save, and training continues: partial recovery. Full recovery does not change the model: the work since
the save is done again on the same batches, and ends as the run without failures does
(`tests/experiments/emulation/test_worker.py` shows it).

Rules that make runs comparable:

- All schemes share everything of a seed: initial weights, order of the samples, hours of the failures and
  nodes that fail. A run with more failures, or more nodes a failure, has all failures of a run with fewer.
- The hours of failures are independent and uniform; their number is fixed, as in the paper.
- The first save is the state at step 0: a failure before the next save returns rows to their initial values.
- A save completes at once; no failure happens during a save (`cpr simulate` studies those).
- A scheme with priority saves every ratio x T_save: of each large table that share of its rows, the small
  tables whole. Its PLS is counted as if everything was saved every T_save, like the paper's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

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
"""The emulated job: 56 h, 2 failures, 8 nodes. The paper's O_save, O_load and O_res are not known to us:
these are worked back from its reported overheads on Criteo Kaggle, with O_res included in O_load."""

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
"""Random streams of a seed, so that hours and nodes of failures do not depend on each other."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: everything but the data that decides how it ends."""

    scheme: str
    """One of `SCHEMES`."""
    seed: int
    """Of the initial weights, the order of the samples, the failures and the random choices of a scheme."""
    network: str = "dlrm"
    """`dlrm` or `dcnv2`."""
    optimizer: str = "rowwise_adagrad"
    """Of the tables and, without the row-wise part, of the dense parameters."""
    failures: int = 2
    """Number of failures in the whole job."""
    nodes_lost: int = 1
    """Nodes that each failure takes down."""
    target_pls: float = 0.1
    """Decides the interval of every scheme but `naive`."""
    ratio: float = 0.125
    """Share of the rows that a save with priority takes."""
    sampling_period: int = 2
    """`ssu` looks at one of this many looked-up ids."""
    top_coverage: float | None = None
    """Skew of the ids: share of the accesses that the most popular percent of a table's ids gets, in a
    variant of the default data set; None: the data set as it is."""

    @property
    def name(self) -> str:
        """A short unique name: the scheme, all settings that are not the default, the seed."""
        shown = [
            f"{field.name} {getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in {"scheme", "seed"} and getattr(self, field.name) != field.default
        ]
        return ", ".join([self.scheme, *shown, f"seed {self.seed}"])

    @property
    def without_failures(self) -> "Run":
        """The run without failures to compare with: the same seed, network, optimizer and data."""
        return Run(
            scheme=NO_FAILURE,
            seed=self.seed,
            network=self.network,
            optimizer=self.optimizer,
            top_coverage=self.top_coverage,
        )

    @property
    def job(self) -> Job:
        """The job for the formulas, which assume that each failure takes one node."""
        return replace(PRODUCTION, T_fail=PRODUCTION.T_total / max(1, self.failures))

    @property
    def interval_h(self) -> float:
        """T_save: hours between two saves of everything; nominal for schemes with priority."""
        if self.scheme == NAIVE:
            return interval_full(self.job) / HOUR_S
        return interval_partial(self.job, self.target_pls) / HOUR_S

    @property
    def save_every_h(self) -> float:
        """Hours between two saves."""
        return self.interval_h * (self.ratio if self.scheme in PRIORITY else 1)


@dataclass(frozen=True, order=True)
class JobEvent:
    """A save, or a failure of some nodes, between two steps."""

    hour: float
    nodes: tuple[int, ...] = ()
    """Nodes that fail; empty: a save."""


def events_of(run: Run) -> list[JobEvent]:
    """Saves and failures in order of time, without the save at hour 0."""
    if run.scheme == NO_FAILURE:
        return []
    return sorted([*_saves(run), *_failures(run)])


def _saves(run: Run) -> Iterator[JobEvent]:
    for number in range(1, math.ceil(HOURS / run.save_every_h)):
        yield JobEvent(number * run.save_every_h)


def _failures(run: Run) -> Iterator[JobEvent]:
    hours = np.random.default_rng([FAILURE_HOURS, run.seed])
    nodes = np.random.default_rng([FAILED_NODES, run.seed])
    for _ in range(run.failures):
        failed = nodes.permutation(NODES)[: run.nodes_lost]
        yield JobEvent(float(hours.uniform(0, HOURS)), tuple(sorted(failed.tolist())))


def step_at(hour: float, num_steps: int) -> int:
    """The number of steps done by an hour."""
    return min(num_steps, int(hour / HOURS * num_steps + 1e-9))  # hours are multiples, rounded a little


def step_saved(run: Run, hour: float, num_steps: int) -> int:
    """The number of steps whose work counts as saved at an hour: those before the last multiple of T_save."""
    return step_at(math.floor(hour / run.interval_h + 1e-9) * run.interval_h, num_steps)


def rows_of_node(node: int, num_rows: int) -> tuple[int, int]:
    """The half-open range of a table's rows that a node has; empty for some nodes if the table is small."""
    return node * num_rows // NODES, (node + 1) * num_rows // NODES
