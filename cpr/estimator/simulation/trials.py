"""State of many simulated runs, advanced from failure to failure.

Between two failures a run recovers, trains and saves at fixed times, so its state at the next failure follows
by arithmetic, for all runs at once, however many saves lie in between. The rules:

- A save is due each `interval_s` of training, and at the end. All training time lost by it (`blocked_save`)
  is spent when it begins. It counts when `O_save` has passed; a failure before that breaks it. A run is over
  when training is done and the last save was waited for.
- A failure costs rescheduling, then loading. A failure in the meantime restarts both.
- Full recovery returns to the last save that counts, and repeats the work since, with its saves.
- Partial recovery resumes where it was; a broken save starts over at once. What the struck nodes learned
  since the last save that counts is lost, once: `cpr.recovery` counts the PLS in the same way. Of a node
  whose memory survives in part (`Job.nodes_lost` below 1) that share is lost.
- With mirrors, what a struck node loses is their age only, unless its keeper is struck in the same recovery
  or mirrors were not whole before it: they are filled at the start, and again after each recovery. A recovery
  lasts until training resumes, however many failures come meanwhile.
- A run that needs more than `give_up_s` ends unfinished: it may never end.
"""

from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cpr.estimator.failures.arrivals import Clock, Failure, Numbers, Times
from cpr.estimator.planning.formulas import Job
from cpr.estimator.planning.mirror import MirrorModel

ROUNDING: Final = 1e-9
"""In intervals: a save that is due this shortly after the end is due at the end."""


class Runs:
    """Runs of one job with full recovery, simulated at the same time, and their costs.

    The costs and the job's useful time add up to the time that a run took. A save comes each `interval_s` of
    training; a run ends unfinished after `give_up_s`.
    """

    def __init__(self, job: Job, interval_s: float, give_up_s: float, num_runs: int) -> None:
        self._job, self._interval_s, self._give_up_s = job, interval_s, give_up_s
        self._wall_s, self._done_s, self._saved_s = (np.zeros(num_runs) for _ in range(3))
        self._due_s = np.full(num_runs, interval_s)  # in training done, as `_done_s` and `_saved_s`
        self._lost_node_s = np.zeros(num_runs)  # training whose effect on a node is lost
        self._running = np.ones(num_runs, np.bool_)
        self.save_s, self.load_s, self.reschedule_s = (np.zeros(num_runs) for _ in range(3))
        self.lost_s = np.zeros(num_runs)
        """Training undone by full recovery."""
        self.failures = np.zeros(num_runs, np.int64)
        self.finished = np.zeros(num_runs, np.bool_)
        """Whether the run ended before `give_up_s`; the costs of the others are those until then."""

    @property
    def pls(self) -> Times:
        """Portion of lost samples of each run."""
        share = min(1.0, self._job.nodes_lost)
        return self._total_lost_s * share / (self._job.T_total * self._job.N_emb)

    @property
    def _total_lost_s(self) -> Times:
        """Training whose effect is lost, summed over nodes."""
        return self._lost_node_s

    def run(self, clock: Clock) -> Self:
        """Simulate all runs to their end; call it once."""
        while self._running.any():
            failure = clock.next()
            self._advance(failure.at_s)
            struck = np.nonzero(self._running)[0]
            self._recover(struck, failure)
            self.failures[struck] += 1
            self._running &= self._wall_s < self._give_up_s
        return self

    def _advance(self, at_s: Times) -> None:
        """Recover, train and save until the times `at_s` or the end, whichever comes first."""
        job, live = self._job, self._running
        # first the recovery from the previous failure, which may not finish before the next one
        left_s = np.where(live, at_s - self._wall_s, 0.0)
        recovers = self.failures > 0
        res_s = np.where(recovers, np.minimum(left_s, job.O_res), 0.0)
        load_s = np.where(recovers, np.minimum(left_s - res_s, job.O_load), 0.0)
        trains = live & (~recovers | (left_s >= job.O_res + job.O_load))
        left_s = np.where(trains, left_s - res_s - load_s, 0.0)

        # saves until the end of the job, and whether the end comes before the failure
        num_saves = np.floor((job.T_total - self._due_s) / self._interval_s + ROUNDING) + 1
        num_saves = np.maximum(num_saves, 0)
        ends_s = job.T_total - self._done_s + num_saves * job.O_blocked
        ends = trains & (left_s >= ends_s)

        # otherwise: saves begun before the failure, and the time spent waiting for them
        cycle_s = self._interval_s + job.O_blocked
        since_due_s = left_s - (self._due_s - self._done_s)  # negative: no save has begun
        begun = np.where(trains, np.clip(np.floor(since_due_s / cycle_s) + 1, 0, num_saves), 0)
        in_last_s = since_due_s - (begun - 1) * cycle_s
        waited_s = np.where(begun > 0, (begun - 1) * job.O_blocked + np.minimum(in_last_s, job.O_blocked), 0)

        self.reschedule_s += res_s
        self.load_s += load_s
        self.save_s += np.where(ends, num_saves * job.O_blocked, waited_s)
        self._done_s += np.where(trains & ~ends, left_s - waited_s, 0)
        self._wall_s = np.where(live, at_s, self._wall_s)
        self._note_saves(begun, in_last_s)
        self.finished |= ends
        self._running = live & ~ends

    def _note_saves(self, begun: Times, in_last_s: Times) -> None:
        """Update the last save that counts: all that began, except the last if the failure broke it."""
        last_s = self._due_s + (begun - 1) * self._interval_s
        is_whole = in_last_s >= self._job.O_save
        counts = (begun > 1) | ((begun > 0) & is_whole)
        self._saved_s = np.where(counts, np.where(is_whole, last_s, last_s - self._interval_s), self._saved_s)
        self._due_s = np.where(
            begun > 0, np.where(is_whole, last_s + self._interval_s, self._done_s), self._due_s
        )

    def _recover(self, struck: Numbers, failure: Failure) -> None:
        """Return to the last save that counts."""
        self.lost_s[struck] += self._done_s[struck] - self._saved_s[struck]
        self._done_s[struck] = self._saved_s[struck]
        self._due_s[struck] = self._saved_s[struck] + self._interval_s


class PartialRuns(Runs):
    """Runs of one job with partial recovery; takes 8 bytes per node and run."""

    def __init__(self, job: Job, interval_s: float, give_up_s: float, num_runs: int) -> None:
        super().__init__(job, interval_s, give_up_s, num_runs)
        # in training done: what a node learned before that is lost already
        self._lost_until_s = np.zeros((num_runs, job.N_emb))

    def _recover(self, struck: Numbers, failure: Failure) -> None:
        """Count the unsaved training of the struck nodes as lost."""
        for num_nodes in np.unique(failure.num_nodes[struck]):
            runs = struck[failure.num_nodes[struck] == num_nodes, None]
            nodes = (failure.node[runs] + np.arange(num_nodes)) % self._job.N_emb
            kept_s = np.maximum(self._saved_s[runs], self._lost_until_s[runs, nodes])
            self._lost_node_s[runs[:, 0]] += (self._done_s[runs] - kept_s).sum(axis=1)
            self._lost_until_s[runs, nodes] = self._done_s[runs]


class MirrorRuns(PartialRuns):
    """Runs of one job with partial recovery and mirrors; takes 20 bytes per node and run.

    Times are those of training with the mirror's longer steps.
    """

    def __init__(
        self, job: Job, interval_s: float, give_up_s: float, num_runs: int, mirror: MirrorModel
    ) -> None:
        super().__init__(job, interval_s, give_up_s, num_runs)
        self._mirror, self._distance = mirror, mirror.distance_on(job.N_emb)
        self._resumed_s = np.zeros(num_runs)  # training done when the newest recovery began
        self._is_whole = np.zeros(num_runs, np.bool_)  # whether mirrors were whole then
        self._recovery = np.zeros(num_runs, np.int32)  # its number
        self._struck_in = np.full((num_runs, job.N_emb), -1, np.int32)  # recovery in which a node was struck
        self._copy_lost_until_s = np.zeros((num_runs, job.N_emb))  # as `_lost_until_s`, of mirrored rows
        self._lost_mirrored_s = np.zeros(num_runs)  # as `_lost_node_s`, of mirrored rows

    @property
    def _total_lost_s(self) -> Times:
        share = self._mirror.share
        return share * self._lost_mirrored_s + (1 - share) * self._lost_node_s

    def _recover(self, struck: Numbers, failure: Failure) -> None:
        """Count the age of mirrors as lost, and the unsaved training of nodes whose mirror does not help."""
        super()._recover(struck, failure)  # for rows without a mirror
        trained_s = self._done_s[struck] - self._resumed_s[struck]
        resumed = struck[trained_s > 0]
        self._is_whole[resumed] = trained_s[trained_s > 0] >= self._mirror.fill_s
        self._resumed_s[resumed] = self._done_s[resumed]
        self._recovery[resumed] += 1
        for num_nodes in np.unique(failure.num_nodes[struck]):
            runs = struck[failure.num_nodes[struck] == num_nodes, None]
            nodes = (failure.node[runs] + np.arange(num_nodes)) % self._job.N_emb
            is_new = self._struck_in[runs, nodes] != self._recovery[runs]
            self._struck_in[runs, nodes] = self._recovery[runs]
            lost_s = self._unsaved_s(runs, nodes)
            falls_back = self._fall_back(runs, nodes)
            age_s = np.where(is_new & ~falls_back, np.minimum(lost_s, self._mirror.age_s), 0)
            self._lost_mirrored_s[runs[:, 0]] += age_s.sum(axis=1)
            # those whose keeper is gone now, and which may have been struck earlier in this recovery
            self._fall_back(runs, (nodes - self._distance) % self._job.N_emb)

    def _unsaved_s(self, runs: Numbers, nodes: Numbers) -> Times:
        """What these nodes would lose without their mirrors."""
        return self._done_s[runs] - np.maximum(self._saved_s[runs], self._copy_lost_until_s[runs, nodes])

    def _fall_back(self, runs: Numbers, nodes: Numbers) -> NDArray[np.bool_]:
        """Count the unsaved training of those nodes as lost whose mirror does not help in this recovery."""
        recovery = self._recovery[runs]
        keepers = (nodes + self._distance) % self._job.N_emb
        helps = self._is_whole[runs] & (self._struck_in[runs, keepers] != recovery)
        falls_back: NDArray[np.bool_] = (self._struck_in[runs, nodes] == recovery) & ~helps
        lost_s = np.where(falls_back, self._unsaved_s(runs, nodes), 0)
        self._lost_mirrored_s[runs[:, 0]] += lost_s.sum(axis=1)
        lost_until_s = self._copy_lost_until_s[runs, nodes]
        self._copy_lost_until_s[runs, nodes] = np.where(falls_back, self._done_s[runs], lost_until_s)
        return falls_back
