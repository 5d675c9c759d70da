"""The arithmetic of the CPR paper: portion of lost samples, overheads, intervals, and when to fall back.

Formulas and symbols are the paper's (Maeng et al., MLSys 2021) as recalled, not checked against its text; the
numbers are those of our notes, in which formula 2 is the PLS that runs count (`cpr.recovery.run.pls`).
Whether partial recovery has an `O_load` and `O_res` of its own there is not certain; here they are the same
for both.

`T_total` is useful training time, `T_fail` mean time between failures of the job, `T_save` training time from
one save to the next, `O_save`, `O_load`, `O_res` times to save a checkpoint, to load one, and to have a
replacement scheduled, `N_emb` nodes that hold embeddings. Times are in seconds; overheads are shares of
`T_total`. All formulas are of first order: `T_save` is far shorter than `T_fail`, failures are spread evenly
over an interval, and none comes while a save or a recovery is under way. `cpr simulate` shows what happens
where that is not so.

The paper saves while training waits. Saving in the background, training loses only `blocked_save`: what it
waits, and how much longer the steps beside the save take. But a save counts only when all of it is stored: a
failure loses `delay` = `O_save - blocked_save`, the training done meanwhile, more than half an interval.
Without `blocked_save` saves are as in the paper.

Partial recovery may save some rows at a time, 1 / `row_share` times in `T_save`. That costs what those row
saves cost together (`O_blocked_partial`), but each counts as soon as it is stored itself (`delay_partial`).
Without `O_rows` both recoveries save everything, as in the paper's formulas.
"""

# ruff: noqa: N802, N803, N806 - the paper's symbols

import math
from dataclasses import dataclass
from typing import Final

FAR_SHORTER: Final = 0.1
"""What is more than this part of the time between failures is not far shorter, as the formulas assume."""
FEW_SAVES: Final = 5
"""Of a job with fewer saves, averages over many say little: its end cuts the last interval short."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job and what failures cost it; times in seconds.

    Raises:
        ValueError: a value is impossible; says what it must be.
    """

    T_total: float
    """Useful training time."""
    T_fail: float
    """Mean time between failures of the whole job."""
    O_save: float
    """From the beginning of a save of everything until it is stored."""
    O_load: float
    """To load from the checkpoint after a failure."""
    O_res: float
    """To have a replacement at work after a failure: detection, scheduling, start."""
    N_emb: int
    """Nodes that hold embeddings: failure domains."""
    blocked_save: float | None = None
    """Of `O_save`, what training loses; None: all of it, saves are synchronous."""
    O_rows: float | None = None
    """From the beginning of a row save until it is stored, where partial recovery saves some rows at a time;
    None: it saves everything, as full recovery does."""
    blocked_rows: float = 0.0
    """Of `O_rows`, what training loses."""
    row_share: float = 1.0
    """Of the rows, that a row save holds."""
    nodes_lost: float = 1.0
    """Nodes' worth of rows that a failure loses on average. Less than 1 where memory outlives workers, more
    where nodes fail together: k of them count k times."""

    def __post_init__(self) -> None:
        for name in ("T_total", "T_fail", "O_save"):
            _check(name, getattr(self, name), above=True)
        for name in ("O_load", "O_res", "nodes_lost", "blocked_save"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), above=False)
        if self.O_rows is not None:
            self._check_rows(self.O_rows)
        if self.N_emb < 1 or self.N_emb != int(self.N_emb):
            raise ValueError(f"N_emb is {self.N_emb}; it is a number of nodes, 1 at least")
        if self.nodes_lost > self.N_emb:
            raise ValueError(f"nodes_lost is {self.nodes_lost:g}, but there are only N_emb = {self.N_emb}")
        if self.O_save > self.T_total:
            raise ValueError(
                f"O_save ({self.O_save:g} s) is longer than T_total ({self.T_total:g} s): such a job cannot "
                "be saved once; are the units right?"
            )
        if self.blocked_save is not None and self.blocked_save > self.O_save:
            raise ValueError(
                f"blocked_save ({self.blocked_save:g} s) is longer than O_save ({self.O_save:g} s), of which "
                "it is a part"
            )

    def _check_rows(self, O_rows: float) -> None:
        _check("O_rows", O_rows, above=True)
        _check("blocked_rows", self.blocked_rows, above=False)
        if self.blocked_rows > O_rows:
            raise ValueError(
                f"blocked_rows ({self.blocked_rows:g} s) is longer than O_rows ({O_rows:g} s), of which it "
                "is a part"
            )
        if not 0 < self.row_share <= 1:
            raise ValueError(f"row_share is {self.row_share:g}; it is a share, above 0 and at most 1")

    @property
    def O_blocked(self) -> float:
        """What a save of everything costs training."""
        return self.O_save if self.blocked_save is None else self.blocked_save

    @property
    def O_blocked_partial(self) -> float:
        """What saving all rows once costs training in partial recovery."""
        return self.O_blocked if self.O_rows is None else self.blocked_rows / self.row_share

    @property
    def time_to_loss_s(self) -> float | None:
        """Mean time between losses of a node's worth of rows; None: none are lost.

        Shorter than `T_fail` where failures take several nodes, and longer where memory outlives them.
        """
        return self.T_fail / self.nodes_lost if self.nodes_lost else None

    @property
    def delay(self) -> float:
        """Training time that goes by from a save's moment until it counts; 0 where saves are synchronous."""
        return self.O_save - self.O_blocked

    @property
    def delay_partial(self) -> float:
        """The same of a save that partial recovery makes."""
        return self.delay if self.O_rows is None else self.O_rows - self.blocked_rows

    @property
    def shortest_partial(self) -> float:
        """Training time in which partial recovery can save all rows once: storage takes no more saves."""
        return self.delay if self.O_rows is None else self.delay_partial / self.row_share


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What saving and failures cost, as shares of `T_total`."""

    save: float
    lost: float
    """Work that is done again."""
    load: float
    reschedule: float

    @property
    def total(self) -> float:
        """All parts together."""
        return self.save + self.lost + self.load + self.reschedule


def expected_pls(job: Job, T_save: float) -> float:
    """PLS to be expected of the whole job with partial recovery (formula 3); `T_total` cancels."""
    check_interval(job, T_save)
    return job.nodes_lost * (T_save / 2 + job.delay_partial) / (job.T_fail * job.N_emb)


def overhead_full(job: Job, T_save: float) -> Overhead:
    """Overhead if everybody goes back to the last checkpoint after each failure (formula 4)."""
    check_interval(job, T_save)
    return Overhead(
        save=job.O_blocked / T_save,
        lost=(T_save / 2 + job.delay) / job.T_fail,
        load=job.O_load / job.T_fail,
        reschedule=job.O_res / job.T_fail,
    )


def overhead_partial(job: Job, T_save: float) -> Overhead:
    """Overhead if only failed nodes go back to the last checkpoint: no work is done again (formula 5)."""
    check_interval(job, T_save)
    return Overhead(
        save=job.O_blocked_partial / T_save,
        lost=0.0,
        load=job.O_load / job.T_fail,
        reschedule=job.O_res / job.T_fail,
    )


def interval_full(job: Job) -> float:
    """The interval with the least overhead for full recovery: Young's optimum (formula 6).

    Never shorter than storage takes, and never longer than the job.
    """
    return _possible(job, math.sqrt(2 * job.O_blocked * job.T_fail))


def interval_partial(job: Job, target_pls: float) -> float:
    """The longest interval whose expected PLS is within the target (formula 7); never longer than the job.

    Raises:
        ValueError: the target is no share, or saves cannot come as often as it asks for.
    """
    check_target(target_pls)
    if job.nodes_lost == 0:
        return job.T_total
    if target_pls < reachable_pls(job):
        raise ValueError(
            f"a target PLS of {target_pls:g} cannot be kept: a save takes {job.O_rows or job.O_save:g} s "
            "until it counts; with one save after the other, the expected PLS is "
            f"{reachable_pls(job):.2g}. Give a larger one"
        )
    T_save = 2 * (target_pls * job.N_emb * job.T_fail / job.nodes_lost - job.delay_partial)
    return min(max(T_save, job.shortest_partial), job.T_total)


def reachable_pls(job: Job) -> float:
    """The smallest PLS that can be expected, with one background save right after the other.

    0 where saves are synchronous: to the formulas, they may come as often as one likes.
    """
    lost_s = job.shortest_partial / 2 + job.delay_partial
    return job.nodes_lost * lost_s / (job.T_fail * job.N_emb)


def pls_threshold(job: Job) -> float:
    """The target PLS above which partial recovery costs less than full recovery at its best.

    Synchronous saves: `sqrt(O_save / (2 T_fail)) / (2 N_emb)`, which is `T_save,part > T_save,full / 2`.
    """
    T_save = max(interval_break_even(job), job.shortest_partial)
    return job.nodes_lost * (T_save / 2 + job.delay_partial) / (job.T_fail * job.N_emb)


def interval_break_even(job: Job) -> float:
    """The interval at which partial recovery costs what full recovery costs at its best."""
    full = overhead_full(job, interval_full(job))
    return job.O_blocked_partial / (full.save + full.lost)


def partial_wins(job: Job, target_pls: float) -> bool:
    """The fall-back rule, asked before training: whether partial recovery is the cheaper one (formula 8)."""
    partial = overhead_partial(job, interval_partial(job, target_pls))
    return partial.total < overhead_full(job, interval_full(job)).total


def check_interval(job: Job, T_save: float) -> None:
    """Refuse an interval that no job can have.

    Raises:
        ValueError: it is not positive, or longer than the job.
    """
    if not 0 < T_save <= job.T_total:
        raise ValueError(
            f"a save each {T_save:g} s is impossible in a job of {job.T_total:g} s; an interval is positive "
            "and not longer than the job"
        )


def check_target(target_pls: float) -> None:
    """Refuse a target that is no portion of the samples.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    if not 0 < target_pls <= 1:
        raise ValueError(
            f"the target PLS is {target_pls:g}; it is a portion of the samples, above 0 and at most 1, "
            "such as 0.1"
        )


def _possible(job: Job, T_save: float) -> float:
    return min(max(T_save, job.delay), job.T_total)


def _check(name: str, value: float, above: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{name} is {value:g}; it must be {'positive' if above else '0 or more'} and finite")
