"""Policy and decision: partial recovery or full recovery, with the reason for the log."""

from dataclasses import dataclass

from cpr.fields import check_fields
from cpr.recovery.decide.assessment import Assessment
from cpr.recovery.run.report import Kind


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Limits of partial recovery."""

    max_lost_share: float = 0.75
    """Largest share of the sharded tables' bytes that may come from the checkpoint while the rest keeps its
    live values; above it, all workers go back to the newest checkpoint. One of two nodes may hold somewhat
    more than half."""
    max_pls: float | None = None
    """Largest portion of lost samples (PLS) of the whole run (CPR paper). A failure that would exceed it is
    recovered fully, if that loses less: work is redone instead of being lost. A full recovery resets the
    portion to that of the save, plus what its rows are behind if it holds only some rows (see `priority` of
    `cpr.PartialRecovery`). None: no limit."""
    max_generations_without_progress: int = 3
    """Number of generations of workers in a row that may die without finishing a training step; the next one
    stops the run with a report."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.max_lost_share <= 1:
            raise ValueError(f"max_lost_share is {self.max_lost_share}; it is a share, from 0 to 1")
        if self.max_pls is not None and not 0 <= self.max_pls <= 1:
            raise ValueError(f"max_pls is {self.max_pls}; it is a portion, from 0 to 1, or None for no limit")
        if self.max_generations_without_progress < 1:
            raise ValueError(
                f"max_generations_without_progress is {self.max_generations_without_progress}; "
                "it must be at least 1"
            )

    def against_pls(self, pls_total: float | None, added: float | None) -> str | None:
        """Why a failure exceeds `max_pls`; None if it does not. What is unknown exceeds any limit."""
        if self.max_pls is None or added == 0:
            return None
        if pls_total is None or added is None:
            return f"the portion of lost samples is not known, and max_pls = {self.max_pls}"
        if pls_total + added <= self.max_pls:
            return None
        return (
            f"the portion of lost samples would rise from {pls_total:.6f} to {pls_total + added:.6f}, above "
            f"max_pls = {self.max_pls}"
        )


@dataclass(frozen=True)
class Decision:
    """Kind of recovery, and the reason."""

    kind: Kind
    reason: str


def decide(
    found: Assessment,
    policy: RecoveryPolicy,
    *,
    lost_share: float,
    continues: bool,
    resumes: bool,
    is_saved: bool,
) -> Decision:
    """Decide how this generation of workers starts, from facts that are equal on all ranks.

    Args:
        found: what is left of the previous generation.
        policy: limits of partial recovery.
        lost_share: share of the sharded tables' bytes whose memory is gone.
        continues: whether earlier workers of this run have trained.
        resumes: whether a run without live memory may load the saves in its directory.
        is_saved: whether the checkpoint directory holds a state.
    """
    if not continues or not (found.old_world_size or found.stale or resumes):
        if resumes and is_saved:
            return Decision("resume", "the run resumes from the newest checkpoint")
        return Decision("start", "nothing was saved yet" if resumes else "the run starts over")
    reason = _against_live_memory(found, policy, lost_share, is_saved)
    if reason is not None:
        beginning = "" if is_saved else ", and nothing was saved yet: training begins at the beginning"
        return Decision("full", f"{reason}{beginning}")
    if lost_share == 0:
        return Decision("process", "the memory of all workers survived")
    return Decision("partial", f"{lost_share:.1%} of the tables were lost")


def _against_live_memory(
    found: Assessment, policy: RecoveryPolicy, lost_share: float, is_saved: bool
) -> str | None:
    if not found.old_world_size:
        return f"live memory is {found.stale}" if found.stale else "no worker's memory is left"
    if found.mismatch is not None:
        return found.mismatch
    if found.slot is None:
        return "no worker holds a whole copy of the dense parameters"
    if lost_share > policy.max_lost_share:
        return (
            f"{lost_share:.1%} of the tables were lost, more than max_lost_share = "
            f"{policy.max_lost_share:.1%}"
        )
    if lost_share and not is_saved:
        return f"{lost_share:.1%} of the tables were lost"
    return None
