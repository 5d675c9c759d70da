"""What the user says about priority saving."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from cpr.fields import check_fields

Scheme = Literal["mfu", "ssu", "scar", "random", "mru", "touched", "round_robin", "never"]
SCHEMES: Final[tuple[str, ...]] = get_args(Scheme)


@dataclass(frozen=True, kw_only=True)
class PriorityConfig:
    """Which rows a row save writes.

    The defaults are the paper's (CPR, MLSys 2021) as far as they are known: the sampling period and the seven
    largest of Criteo Kaggle's tables, from which `covering` follows, are recalled and were not checked.
    """

    scheme: Scheme = "mfu"
    """What ranks the rows: `mfu` lookups since they were last saved, `ssu` a sampled, bounded list of those
    looked up, `scar` how far their weights are from what is saved. To compare with: `random` rows, `mru`
    those looked up last, all that were `touched` (no bound), `round_robin`, and `never` any."""
    ratio: float = 0.125
    """Share of a table's rows that a save writes at most, rounded up to a row; with `touched`, no bound."""
    sampling_period: int = 2
    """Of `ssu`: every how manieth lookup is offered to the list."""
    covering: float = 0.995
    """The fewest tables, largest first, that hold this share of all rows are prioritised; others are small,
    and always saved whole, as are all without a fused optimizer (data-parallel ones)."""
    seed: int = 0
    """Of `random`."""

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
