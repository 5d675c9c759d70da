"""Partial recovery or full: what speaks for which, in words that end up in the log."""

from dataclasses import dataclass

from cpr.recovery.run.policy import RecoveryPolicy
from cpr.recovery.run.report import Kind


@dataclass(frozen=True)
class Decision:
    """What is done, and why."""

    kind: Kind
    reason: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What all ranks have agreed on after they met."""

    continues: bool
    """Whether workers of this run were at work before."""
    resumes: bool
    """Whether a run without live memory may go on from what is saved: by its user's wish, or because it is
    its own."""
    is_saved: bool
    """Whether the checkpoint directory holds a state."""
    holds_anything: bool
    """Whether somebody holds memory of the generation before."""
    has_replicated_state: bool
    """Whether somebody holds dense parameters and registered states of one step."""
    lost_share: float
    """Of the sharded tables' bytes."""
    stale: str | None = None
    """Why live memory must not be used, if it is because the directory has moved on."""
    objection: str | None = None
    """Why live memory and this model do not go together."""


def decide(found: Findings, policy: RecoveryPolicy) -> Decision:
    """How this generation of workers begins."""
    if not found.continues or not (found.holds_anything or found.stale or found.resumes):
        if found.resumes and found.is_saved:
            return Decision("resume", "the run goes on from the newest checkpoint")
        return Decision("start", "nothing was saved yet" if found.resumes else "the run begins anew")
    reason = _against_live_memory(found, policy)
    if reason is None:
        if found.lost_share == 0:
            return Decision("process", "the memory of all workers outlived them")
        return Decision("partial", f"{found.lost_share:.1%} of the tables were lost")
    if not found.is_saved:
        return Decision("full", f"{reason}, and nothing was saved yet: training begins at the beginning")
    return Decision("full", reason)


def _against_live_memory(found: Findings, policy: RecoveryPolicy) -> str | None:
    if not found.holds_anything:
        return f"live memory is {found.stale}" if found.stale else "no worker's memory is left"
    if found.objection is not None:
        return found.objection
    if not found.has_replicated_state:
        return "no worker holds a whole copy of the dense parameters"
    if found.lost_share > policy.max_lost_share:
        return (
            f"{found.lost_share:.1%} of the tables were lost, more than max_lost_share = "
            f"{policy.max_lost_share:.1%}"
        )
    if found.lost_share and not found.is_saved:
        return f"{found.lost_share:.1%} of the tables were lost"
    return None
