"""What was set out for, as data: the goal of every figure that has one, from the project's issues.

The report prints them beside what was measured, the missed ones as plainly as the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from experiments.report.results import Measured, Result, finished_only, number


class Sense(Enum):
    """How a value must lie to its limit."""

    AT_LEAST = "at least "
    AT_MOST = "at most "
    WITHIN = "within ± "
    NOT_CLEARLY_BELOW = "not clearly below "
    NOT_CLEARLY_ABOVE = "not clearly above "


class Verdict(Enum):
    """What became of a goal."""

    MET = "met"
    MET_IN_PART = "met, not over its whole range"
    MISSED_IN_PART = "missed, though its range reaches it"
    MISSED = "missed"
    OPEN = "not measured"

    @property
    def is_short(self) -> bool:
        """Whether the goal was missed, firmly or not."""
        return self in {Verdict.MISSED, Verdict.MISSED_IN_PART}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """That `figure` of `experiment` is at least, at most or within plus and minus `limit`."""

    experiment: str
    figure: str
    sense: Sense
    limit: float
    where: str = ""
    """Under which circumstances, if the figure's name does not say."""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.sense.value}{number(self.limit, 3)}{where}"

    def verdict(self, measured: Measured) -> Verdict:
        """The value decides; its range, where it has one, says how firmly.

        `NOT_CLEARLY_BELOW` and `NOT_CLEARLY_ABOVE` are met if any of the range is where the value may be: a
        difference that cannot be told from none.
        """
        if measured.value is None:
            return Verdict.OPEN
        least, most = self._allowed()
        low, high = measured.bounds or (measured.value, measured.value)
        if self.sense in {Sense.NOT_CLEARLY_BELOW, Sense.NOT_CLEARLY_ABOVE}:
            return Verdict.MET if low <= most and least <= high else Verdict.MISSED
        if least <= measured.value <= most:
            return Verdict.MET if least <= low and high <= most else Verdict.MET_IN_PART
        return Verdict.MISSED_IN_PART if low <= most and least <= high else Verdict.MISSED

    def _allowed(self) -> tuple[float, float]:
        match self.sense:
            case Sense.AT_LEAST | Sense.NOT_CLEARLY_BELOW:
                return self.limit, inf
            case Sense.AT_MOST | Sense.NOT_CLEARLY_ABOVE:
                return -inf, self.limit
            case Sense.WITHIN:
                return -self.limit, self.limit


def _goals(experiment: str, sense: Sense, where: str = "", **limits: float) -> list[Goal]:
    return [
        Goal(experiment=experiment, figure=figure, sense=sense, limit=limit, where=where)
        for figure, limit in limits.items()
    ]


GOALS: Final[Sequence[Goal]] = [
    *_goals("preparation", Sense.AT_LEAST, ratio_to_torchrec=8, ratio_to_polars=0.7),
    *_goals("caching", Sense.AT_LEAST, second_epoch_speedup=5),
    *_goals("caching", Sense.AT_MOST, first_epoch_ratio=1),
    *_goals("throughput", Sense.AT_LEAST, ratio_to_torchrec_best=2, ratio_to_torchrec_fp32=1.3),
    *_goals("precision", Sense.WITHIN, auc_bf16_minus_fp32=0.0005),
    *_goals("memory_growth", Sense.NOT_CLEARLY_ABOVE, growth_bytes_per_1000_steps=0),
    *_goals(
        "checkpointing",
        Sense.AT_MOST,
        blocked_ratio_rolling=1 / 8,
        blocked_ratio_consistent=1 / 4,
        lost_ratio_to_dcp_async=1 / 2,
        row_save_blocked_share=1 / 6,
        row_save_bytes_share=1 / 6,
        peak_extra_bytes=512 * 1024**2,
    ),
    *_goals(
        "checkpointing", Sense.AT_LEAST, save_ratio_to_dcp=1.2, save_ratio_to_raw=0.8, load_ratio_to_dcp=1
    ),
    *_goals("recovery", Sense.AT_LEAST, first_restart_success=1),
    *_goals(
        "recovery",
        Sense.AT_MOST,
        time_ratio_2=0.5,
        time_ratio_4=0.4,
        rows_kept_wrong=0,
        rows_restored_wrong=0,
        dense_wrong=0,
        batches_twice=0,
        batches_left_out=0,
    ),
    *_goals("recovery_soak", Sense.WITHIN, soak_auc_delta=0.0002),
    *_goals("recovery_soak", Sense.AT_MOST, soak_rows_wrong=0, soak_leftovers=0, soak_nodes_failed=0),
    *_goals("tracking", Sense.AT_MOST, mfu_step_share=0.01, ssu_step_share=0.005),
    *_goals("overhead", Sense.AT_MOST, overhead_cpr_background=0.003),
    *_goals(
        "overhead",
        Sense.NOT_CLEARLY_BELOW,
        "no failure at all, which no scheme of the paper surpasses",
        auc_delta_mfu=0,
        auc_delta_mfu_sgd=0,
        auc_delta_mfu_dcnv2=0,
    ),
    *_goals(
        "splitting",
        Sense.AT_LEAST,
        "4 workers, 214 ids a sample, which are left out as in the paper",
        bytes_saved_lr=0.7226,
        bytes_saved_fm=0.7226,
        bytes_saved_deepfm=0.7226,
    ),
    *_goals("splitting", Sense.AT_LEAST, planner_hits_share=0.9, auto_worst_ratio=0.97),
    *_goals("mstopk", Sense.AT_LEAST, mstopk_speedup_10m=3, mstopk_speedup_100m=3, mstopk_energy=0.99),
    *_goals(
        "communication", Sense.AT_LEAST, auto_worst_ratio=0.97, wide_1gbps_speedup=1.25, table_vi_hits=36
    ),
    *_goals("communication", Sense.NOT_CLEARLY_BELOW, auc_delta_auto=0),
]


def outcomes(results: Mapping[str, Result]) -> list[tuple[Goal, Measured, Verdict]]:
    """Every goal whose experiment is finished, with what was measured and what became of it.

    Raises:
        ValueError: a goal names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    measured = [
        (goal, finished[goal.experiment].measured(goal.figure))
        for goal in GOALS
        if goal.experiment in finished
    ]
    return [(goal, value, goal.verdict(value)) for goal, value in measured]
