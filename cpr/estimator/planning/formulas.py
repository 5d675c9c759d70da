"""Formulas of the CPR paper: portion of lost samples (PLS), overheads, save intervals, fall-back rule.

Formulas and symbols are the paper's (Maeng et al., MLSys 2021) as recalled, not checked against its text; the
numbers are those of our notes, in which formula 2 is the PLS that runs count
(`cpr.recovery.restore.pls_budget`). The paper may have separate `O_load` and `O_res` for partial recovery;
here they are the same for both.

`T_total` is useful training time, `T_fail` the job's mean time between failures, `T_save` training time from
save to save, `O_save`, `O_load`, `O_res` times to save a checkpoint, to load one, and to schedule a
replacement, `N_emb` nodes that hold embeddings. Times are in seconds; overheads are shares of `T_total`. All
formulas are of first order: `T_save` is much shorter than `T_fail`, failures are uniform over an interval,
and none happens during a save or a recovery. `cpr simulate` shows what happens otherwise.

Two extensions. With background saves training loses only `blocked_save` (waiting, and slower steps), but a
save counts only once it is stored: a failure loses `delay` = `O_save - blocked_save` more than half an
interval. And partial recovery may save a share of the rows at a time, 1 / `row_share` times in `T_save`: that
costs the sum of the row saves (`O_blocked_partial`), but each counts once it is stored (`delay_partial`).
Without `blocked_save` and `O_rows` the formulas are the paper's.
"""

# ruff: noqa: N802, N803, N806 - the paper's symbols

import math
from dataclasses import dataclass
from typing import Final

FAR_SHORTER: Final = 0.1
"""Share of the time between failures up to which a time is "much shorter", as the formulas assume."""
FEW_SAVES: Final = 5
"""Number of saves below which averages mean little, as the end of the job cuts the last interval short."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job and its costs of saves and failures; times in seconds.

    Raises:
        ValueError: a value is impossible; the message tells the valid range.
    """

    T_total: float
    """Useful training time."""
    T_fail: float
    """Mean time between failures of the whole job."""
    O_save: float
    """From the start of a full save until it is stored."""
    O_load: float
    """Time to load from the checkpoint after a failure."""
    O_res: float
    """Time to replace failed workers: detection, scheduling, start."""
    N_emb: int
    """Nodes that hold embeddings: failure domains."""
    blocked_save: float | None = None
    """Part of `O_save` that training loses; None: all of it, saves are synchronous."""
    O_rows: float | None = None
    """From the start of a row save until it is stored; None: partial recovery makes full saves, too."""
    blocked_rows: float = 0.0
    """Part of `O_rows` that training loses."""
    row_share: float = 1.0
    """Share of the rows in a row save."""
    nodes_lost: float = 1.0
    """Mean nodes' worth of rows lost per failure. Below 1 where memory survives workers, above 1 where nodes
    fail together."""

    def __post_init__(self) -> None:
        for name in ("T_total", "T_fail", "O_save"):
            _check(name, getattr(self, name), above=True)
        for name in ("O_load", "O_res", "nodes_lost", "blocked_save"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), above=False)
        if self.O_rows is not None:
            _check("O_rows", self.O_rows, above=True)
            _check("blocked_rows", self.blocked_rows, above=False)
        if not 0 < self.row_share <= 1:
            raise ValueError(f"row_share is {self.row_share:g}; it is a share, above 0 and at most 1")
        if self.N_emb < 1 or self.N_emb != int(self.N_emb):
            raise ValueError(f"N_emb is {self.N_emb}; it is a number of nodes, 1 at least")
        if self.nodes_lost > self.N_emb:
            raise ValueError(f"nodes_lost is {self.nodes_lost:g}, but there are only N_emb = {self.N_emb}")
        if self.O_save > self.T_total:
            raise ValueError(
                f"O_save ({self.O_save:g} s) is longer than T_total ({self.T_total:g} s): such a job cannot "
                "be saved once; are the units right?"
            )
        for part, whole in (("blocked_save", "O_save"), ("blocked_rows", "O_rows")):
            part_s, whole_s = getattr(self, part), getattr(self, whole)
            if part_s is not None and whole_s is not None and part_s > whole_s:
                raise ValueError(
                    f"{part} ({part_s:g} s) is longer than {whole} ({whole_s:g} s), of which it is a part"
                )

    @property
    def O_blocked(self) -> float:
        """Training time lost by a full save."""
        return self.O_save if self.blocked_save is None else self.blocked_save

    @property
    def O_blocked_partial(self) -> float:
        """Training time lost in partial recovery by saving all rows once."""
        return self.O_blocked if self.O_rows is None else self.blocked_rows / self.row_share

    @property
    def time_to_loss_s(self) -> float | None:
        """Mean time between losses of a node's worth of rows; None if failures lose no rows."""
        return self.T_fail / self.nodes_lost if self.nodes_lost else None

    @property
    def delay(self) -> float:
        """Training time from the start of a full save until it counts; 0 for synchronous saves."""
        return self.O_save - self.O_blocked

    @property
    def delay_partial(self) -> float:
        """Training time from the start of a row save until it is stored; full save if `O_rows` is None."""
        return self.delay if self.O_rows is None else self.O_rows - self.blocked_rows

    @property
    def shortest_partial(self) -> float:
        """Shortest training time in which storage can take all rows once in partial recovery."""
        return self.delay if self.O_rows is None else self.delay_partial / self.row_share


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Overheads of saving and failures, as shares of `T_total`."""

    save: float
    lost: float
    """Repeated work."""
    load: float
    reschedule: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.save + self.lost + self.load + self.reschedule


def expected_pls(job: Job, T_save: float) -> float:
    """Expected PLS of the whole job with partial recovery (formula 3); `T_total` cancels."""
    check_interval(job, T_save)
    return _pls(job, T_save)


def overhead_full(job: Job, T_save: float) -> Overhead:
    """Overhead of full recovery: all nodes return to the last checkpoint after each failure (formula 4)."""
    check_interval(job, T_save)
    return Overhead(
        save=job.O_blocked / T_save,
        lost=(T_save / 2 + job.delay) / job.T_fail,
        load=job.O_load / job.T_fail,
        reschedule=job.O_res / job.T_fail,
    )


def overhead_partial(job: Job, T_save: float) -> Overhead:
    """Overhead of partial recovery: only failed nodes return to the last checkpoint (formula 5)."""
    check_interval(job, T_save)
    return Overhead(
        save=job.O_blocked_partial / T_save,
        lost=0.0,
        load=job.O_load / job.T_fail,
        reschedule=job.O_res / job.T_fail,
    )


def interval_full(job: Job) -> float:
    """The interval with the least overhead for full recovery: Young's optimum (formula 6).

    Never shorter than storage needs for a save, and never longer than the job.
    """
    return min(max(math.sqrt(2 * job.O_blocked * job.T_fail), job.delay), job.T_total)


def interval_partial(job: Job, target_pls: float) -> float:
    """The longest interval whose expected PLS is within the target (formula 7); never longer than the job.

    Raises:
        ValueError: the target is not a share, or storage is too slow for it.
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
    """The smallest expected PLS, with back-to-back background saves; 0 for synchronous saves."""
    return _pls(job, job.shortest_partial)


def pls_threshold(job: Job) -> float:
    """The target PLS above which partial recovery costs less than full recovery at its best.

    Synchronous saves: `sqrt(O_save / (2 T_fail)) / (2 N_emb)`, which is `T_save,part > T_save,full / 2`.
    """
    return _pls(job, max(interval_break_even(job), job.shortest_partial))


def interval_break_even(job: Job) -> float:
    """The interval at which partial recovery costs as much as full recovery at its best interval."""
    full = overhead_full(job, interval_full(job))
    return job.O_blocked_partial / (full.save + full.lost)


def partial_wins(job: Job, target_pls: float) -> bool:
    """The fall-back rule, applied before training: whether partial recovery is cheaper (formula 8)."""
    partial = overhead_partial(job, interval_partial(job, target_pls))
    return partial.total < overhead_full(job, interval_full(job)).total


def check_interval(job: Job, T_save: float) -> None:
    """Check an interval.

    Raises:
        ValueError: the interval is not positive, or longer than the job.
    """
    if not 0 < T_save <= job.T_total:
        raise ValueError(
            f"a save each {T_save:g} s is impossible in a job of {job.T_total:g} s; an interval is positive "
            "and not longer than the job"
        )


def check_target(target_pls: float) -> None:
    """Check a target PLS.

    Raises:
        ValueError: the target is not above 0 and at most 1.
    """
    if not 0 < target_pls <= 1:
        raise ValueError(
            f"the target PLS is {target_pls:g}; it is a portion of the samples, above 0 and at most 1, "
            "such as 0.1"
        )


def _pls(job: Job, T_save: float) -> float:
    """Formula 3, for any interval."""
    return job.nodes_lost * (T_save / 2 + job.delay_partial) / (job.T_fail * job.N_emb)


def _check(name: str, value: float, above: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{name} is {value:g}; it must be {'positive' if above else '0 or more'} and finite")
