"""How much loss is put up with before everybody goes back, and when a run is given up."""

from dataclasses import dataclass

from cpr.fields import check_fields


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """When partial recovery is not enough."""

    max_lost_share: float = 0.75
    """Largest share of the sharded tables' bytes that may come from the checkpoint while the rest goes on
    with live values; above it, everybody goes back to the newest checkpoint. One of two
    nodes may hold somewhat more than half."""
    max_pls: float | None = None
    """Largest portion of lost samples of the whole run (CPR paper); a failure that would take it above is
    recovered fully, if that loses less: work is redone instead of being lost. None: no such limit. What is
    gone back over counts no more: after a full recovery, the portion is that of the save, and of what its
    rows are behind where it is a save of some rows (see `priority` of `cpr.PartialRecovery`)."""
    max_generations_without_progress: int = 3
    """So many generations of workers in a row may die without finishing a training step; the next one stops
    the run with a report instead of dying of the same."""

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
        """Why a failure costs more than `max_pls` allows; None if it does not.

        Args:
            pls_total: before it; None: not known, which is too much wherever there is a limit.
            added: by it.
        """
        if self.max_pls is None or added == 0:
            return None
        if pls_total is None or added is None:
            return f"how large the portion of lost samples is, is not known, and max_pls = {self.max_pls}"
        if pls_total + added <= self.max_pls:
            return None
        return (
            f"the portion of lost samples would rise from {pls_total:.6f} to {pls_total + added:.6f}, above "
            f"max_pls = {self.max_pls}"
        )
