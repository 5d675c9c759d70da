"""How much loss is put up with before everybody goes back, and when a run is given up."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """When partial recovery is not enough."""

    max_lost_share: float = 0.75
    """Largest share of the sharded tables' bytes that may come from the checkpoint while the rest goes on
    with live values; above it, everybody goes back to the newest checkpoint. One of two
    nodes may hold somewhat more than half."""
    max_generations_without_progress: int = 3
    """So many generations of workers in a row may die without finishing a training step; the next one stops
    the run with a report instead of dying of the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_lost_share <= 1:
            raise ValueError(f"max_lost_share is {self.max_lost_share}; it is a share, from 0 to 1")
        if self.max_generations_without_progress < 1:
            raise ValueError(
                f"max_generations_without_progress is {self.max_generations_without_progress}; "
                "it must be at least 1"
            )
