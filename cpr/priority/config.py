"""Configuration of priority saving."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from cpr.fields import check_fields

Scheme = Literal["mfu", "ssu", "scar", "random", "mru", "touched", "round_robin", "never"]
SCHEMES: Final[tuple[str, ...]] = get_args(Scheme)


@dataclass(frozen=True, kw_only=True)
class PriorityConfig:
    """Choice of the rows that a row save writes.

    The defaults are the paper's (CPR, MLSys 2021) as recalled: the sampling period and the seven largest of
    Criteo Kaggle's tables, from which `covering` follows, were not checked.
    """

    scheme: Scheme = "mfu"
    """Ranking of the rows: `mfu` by lookups since their last save, `ssu` a sampled, bounded list of looked-up
    rows, `scar` by the change of their weights since their last save. For comparison: `random`, `mru` (looked
    up last), `touched` (all that were looked up, without bound), `round_robin`, and `never`."""
    ratio: float = 0.125
    """Largest share of a table's rows in a save, rounded up to a row; `touched` has no bound."""
    sampling_period: int = 2
    """For `ssu`: one of this many lookups is offered to the list."""
    covering: float = 0.995
    """The largest tables that together hold this share of all rows are prioritised; the others are always
    saved whole, as are tables without a fused optimizer (data-parallel ones)."""
    seed: int = 0
    """Seed of `random`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio is {self.ratio}; choose a share of rows above 0, at most 1, such as 0.125"
            )
        if self.sampling_period < 1:
            raise ValueError(
                f"sampling_period is {self.sampling_period}; 1 takes every lookup, 2 every other"
            )
        if not 0 <= self.covering <= 1:
            raise ValueError(
                f"covering is {self.covering}; 0 prioritises no table, 1 all, 0.995 all but the small ones"
            )
