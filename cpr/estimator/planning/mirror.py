"""Formulas for mirrors (`cpr.mirror`): their memory, bytes, age and cost, and the PLS and overhead with them.

Each node keeps the rows of the one before it in a ring. A lost node loses only what its mirror was behind,
unless its rows come from the checkpoint all the same: because its keeper is lost with it, or because the
mirrors are not whole. All of them are filled again after each failure, as `cpr.mirror` does it.

The assumptions are those of `cpr.estimator.planning.formulas`, whose symbols these are, and failures without
a memory. Tables are spread evenly over the nodes. Loading is taken to be as long from a mirror as from the
checkpoint. That only a node and its keeper lost together lose the copy is Gemini's argument (Wang et al.,
SOSP 2023) for two copies, here in a ring.
"""

# ruff: noqa: N803 - the paper's symbols

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import Job, Overhead, check_interval
from cpr.fields import check_fields

CPU_S_PER_BYTE: Final = 2e-9
"""Processor time of a node for each byte of the mirror: to copy, digest and send it, and to receive and write
a neighbour's, the kernel's included. Measured on one machine: 1.5 s/GB for moments of 3 MB and more, 2.5 s/GB
for one of 0.7 MB."""
ROW_NUMBER_BYTES: Final = 8
"""Sent with each row."""
FILL_BYTES_PER_STEP: Final = 16 << 20
"""Bytes that a worker sends in a step while mirrors are filled (`cpr.mirror.copy.PASS_BYTES`)."""
BUFFERS: Final = 2 * 1.25
"""Memory for moments on their way, over the bytes of one: at the sender and at the keeper."""


@dataclass(frozen=True, kw_only=True)
class MirrorModel:
    """A mirror and what it depends on. All figures are those of one node.

    Raises:
        ValueError: a value is impossible; the message tells the valid range.
    """

    rows: int
    """Rows of its tables."""
    row_bytes: int
    """Bytes of a row, with its optimizer state."""
    changed_rows: float
    """Rows that a step changes."""
    step_s: float
    """Duration of a training step without mirrors."""
    workers: int = 1
    link_gbps: float = 25.0
    """Speed of the network between two nodes, in Gb/s, as far as training leaves it free."""
    slows_s: float | None = None
    """Training time that a step loses to the mirror; None: its processor time, one core for each worker."""
    every_steps: int = 1
    """Steps from moment to moment, if the link can keep up."""
    share: float = 1.0
    """Share of the rows that is mirrored. Others come from the checkpoint, and count as if they were used as
    much."""
    distance: int = 1
    """Places in the ring from a node to its keeper."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("rows", "row_bytes", "workers", "every_steps", "distance"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 at least")
        for name in ("changed_rows", "step_s", "link_gbps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be positive")
        if self.slows_s is not None and self.slows_s < 0:
            raise ValueError(f"slows_s is {self.slows_s:g}; it must be 0 or more")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share:g}; it is a share of the rows, above 0 and at most 1")
        if self.changed_rows > self.rows:
            raise ValueError(
                f"changed_rows is {self.changed_rows:g}, but the node has only {self.rows:,} rows"
            )

    @property
    def period_steps(self) -> int:
        """Steps from moment to moment: `every_steps`, or as many as the link takes for a moment."""
        all_rows_s = self._travel_s(self._mirrored_rows)
        longest = max(self.every_steps, math.ceil(all_rows_s / self.step_s))
        periods = range(self.every_steps, longest + 1)
        # a moment grows more slowly than its period, as rows change again: if one fits, longer ones do
        fits = bisect_left(
            periods, True, key=lambda steps: self._travel_s(self._changed_in(steps)) <= steps * self.step_s
        )
        return periods[min(fits, len(periods) - 1)]

    @property
    def moment_bytes(self) -> float:
        """Bytes of a moment."""
        return self._changed_in(self.period_steps) * (self.row_bytes + ROW_NUMBER_BYTES)

    @property
    def bytes_per_step(self) -> float:
        """Bytes sent in a step, on average."""
        return self.moment_bytes / self.period_steps

    @property
    def link_share(self) -> float:
        """Share of the link that is used."""
        return self.bytes_per_step / (self._link_bytes_per_s * self.slowed_step_s)

    @property
    def memory_bytes(self) -> float:
        """Memory of a node for the mirror that it keeps, and for moments on their way."""
        moment_bytes = max(self.moment_bytes, self.workers * FILL_BYTES_PER_STEP)
        return self._mirrored_rows * self.row_bytes + BUFFERS * moment_bytes

    @property
    def slow_share(self) -> float:
        """Share by which a step becomes longer."""
        slows_s = self.slows_s
        if slows_s is None:
            slows_s = self.bytes_per_step * CPU_S_PER_BYTE / self.workers
        return slows_s / self.step_s

    @property
    def slowed_step_s(self) -> float:
        """Duration of a step with the mirror."""
        return self.step_s * (1 + self.slow_share)

    @property
    def age_steps(self) -> float:
        """Steps that a whole mirror is behind, on average over time; the unfinished step does not count."""
        travel_s = self._travel_s(self._changed_in(self.period_steps))
        return (self.period_steps - 1) / 2 + travel_s / self.slowed_step_s

    @property
    def age_s(self) -> float:
        """Training time that a whole mirror is behind, on average."""
        return self.age_steps * self.slowed_step_s

    @property
    def fill_s(self) -> float:
        """Training time until the mirrors are whole, at the start and after each failure."""
        part_rows = self.workers * FILL_BYTES_PER_STEP / self.row_bytes
        steps_of_part = max(1, math.ceil(self._travel_s(part_rows) / self.slowed_step_s))
        return math.ceil(self._mirrored_rows / part_rows) * steps_of_part * self.slowed_step_s

    def distance_on(self, num_nodes: int) -> int:
        """Places to the keeper in a ring of so many nodes; in a small one, the keeper is the next node."""
        return self.distance if self.distance < num_nodes else 1

    @property
    def _mirrored_rows(self) -> float:
        return self.share * self.rows

    @property
    def _link_bytes_per_s(self) -> float:
        return self.link_gbps * 1e9 / 8

    def _changed_in(self, steps: int) -> float:
        """Mirrored rows that change in so many steps, each once; the most that there can be.

        Evenly used rows would be as many; rows of which some are used more often are fewer.
        """
        num_rows = self._mirrored_rows
        share = min(1.0, self.changed_rows / num_rows)
        return num_rows if share == 1 else -num_rows * math.expm1(steps * math.log1p(-share))

    def _travel_s(self, num_rows: float) -> float:
        """From the taking of a moment to its arrival."""
        s_per_byte = 1 / self._link_bytes_per_s + CPU_S_PER_BYTE / self.workers
        return num_rows * (self.row_bytes + ROW_NUMBER_BYTES) * s_per_byte


@dataclass(frozen=True, kw_only=True)
class Uncovered:
    """Why lost nodes get their rows from the checkpoint in spite of mirrors: each a share of lost nodes."""

    together: float
    """Their keeper is lost by the same failure."""
    recovering: float
    """Their keeper is lost by another failure, while one of both recovers."""
    filling: float
    """The mirrors are not whole yet."""

    @property
    def total(self) -> float:
        """Share of the lost nodes for which at least one is true."""
        return 1 - (1 - self.together) * (1 - self.recovering) * (1 - self.filling)


def uncovered(job: Job, mirror: MirrorModel, failures: FailureModel) -> Uncovered:
    """Shares of the lost nodes that their mirrors do not help.

    Args:
        job: on two nodes at least.
        mirror: of each node.
        failures: how many nodes fail together.

    Raises:
        ValueError: there is one node only.
    """
    if job.N_emb < 2:
        raise ValueError("a mirror needs another node to be on, and N_emb is 1")
    group = min(failures.group_nodes, job.N_emb)
    distance = mirror.distance_on(job.N_emb)
    # of `group` nodes in a row in the ring, those whose keeper is among them
    without_keeper = max(0, group - distance) + max(0, group - (job.N_emb - distance))
    mean_nodes = 1 + failures.group_share * (group - 1)
    recovery_s = job.O_load + job.O_res
    fills = 1 - math.exp(-mirror.fill_s / job.T_fail)
    at_start = min(1.0, mirror.fill_s / (job.T_total * (1 + mirror.slow_share)))
    return Uncovered(
        together=failures.group_share * without_keeper / mean_nodes,
        # a node is lost while its keeper recovers, or the other way round
        recovering=1 - math.exp(-2 * recovery_s * mean_nodes / (job.T_fail * job.N_emb)),
        filling=at_start + (1 - at_start) * fills,
    )


def expected_pls_with_mirror(job: Job, T_save: float, mirror: MirrorModel, failures: FailureModel) -> float:
    """Expected PLS of the whole job with mirrors: formula 3, but covered rows lose the mirror's age only."""
    check_interval(job, T_save)
    covered = mirror.share * (1 - uncovered(job, mirror, failures).total)
    saved_s = T_save * (1 + mirror.slow_share) / 2 + job.delay_partial
    lost_s = covered * min(mirror.age_s, saved_s) + (1 - covered) * saved_s
    return job.nodes_lost * lost_s / (job.T_fail * job.N_emb)


def overhead_with_mirror(job: Job, T_save: float, mirror: MirrorModel) -> Overhead:
    """Overhead of partial recovery with mirrors: formula 5, in longer steps, which `save` includes."""
    check_interval(job, T_save)
    slowed = 1 + mirror.slow_share
    return Overhead(
        save=mirror.slow_share + job.O_blocked_partial / T_save,
        lost=0.0,
        load=slowed * job.O_load / job.T_fail,
        reschedule=slowed * job.O_res / job.T_fail,
    )
