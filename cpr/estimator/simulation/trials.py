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
- A run that needs more than `give_up_s` ends unfinished: it may never end.
"""

from typing import Final, Self

import numpy as np

from cpr.estimator.failures.arrivals import Clock, Failure, Numbers, Times
from cpr.estimator.planning.formulas import Job

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
        return self._lost_node_s * share / (self._job.T_total * self._job.N_emb)

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
