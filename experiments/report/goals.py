"""The goal of every figure that has one, as the project's issues set it, and whether it was reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from dlrm.config.schema import MODELS
from experiments.report.results import FigureValue, Result, finished_only, number


class Sense(Enum):
    """How a value must lie to its limit."""

    AT_LEAST = "at least "
    AT_MOST = "at most "
    WITHIN = "within ± "
    NOT_WORSE = "not worse by more than "
    """A non-inferiority test: the limit is a margin fixed in advance, and the whole interval must lie above
    minus that margin. An interval that merely reaches 0 shows nothing."""


class Outcome(Enum):
    """Whether a goal was reached."""

    REACHED = "reached"
    REACHED_IN_PART = "reached, not over its whole range"
    NOT_SHOWN = "not shown: the interval is wider than the margin"
    MISSED_IN_PART = "missed, though its range reaches it"
    MISSED = "missed"
    OPEN = "not measured"

    @property
    def is_short(self) -> bool:
        """Whether the goal was missed, firmly or not."""
        return self in {Outcome.NOT_SHOWN, Outcome.MISSED_IN_PART, Outcome.MISSED}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal for one figure of an experiment: the value must compare to `limit` as `sense` says.

    `where` names the circumstances of the measurement, for display.
    """

    experiment: str
    figure: str
    sense: Sense
    limit: float
    where: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.sense.value}{number(self.limit, 3)}{where}"

    def outcome(self, measured: FigureValue) -> Outcome:
        """The value decides; its range, where it has one, says how firmly."""
        if measured.value is None:
            return Outcome.OPEN
        least, most = self._allowed()
        low, high = measured.bounds or (measured.value, measured.value)
        if least <= low and high <= most:
            return Outcome.REACHED
        if self.sense is Sense.NOT_WORSE:
            return Outcome.NOT_SHOWN if least <= high else Outcome.MISSED
        if least <= measured.value <= most:
            return Outcome.REACHED_IN_PART
        return Outcome.MISSED_IN_PART if low <= most and least <= high else Outcome.MISSED

    def _allowed(self) -> tuple[float, float]:
        match self.sense:
            case Sense.AT_LEAST:
                return self.limit, inf
            case Sense.AT_MOST:
                return -inf, self.limit
            case Sense.WITHIN:
                return -self.limit, self.limit
            case Sense.NOT_WORSE:
                return -self.limit, inf


def _goals(experiment: str, sense: Sense, where: str = "", **limits: float) -> list[Goal]:
    return [
        Goal(experiment=experiment, figure=figure, sense=sense, limit=limit, where=where)
        for figure, limit in limits.items()
    ]


RESOLUTION: Final = 0.0002
"""Difference in AUC that the emulation was to resolve, set before its first run: the margin of its goals."""
REFERENCE_MARGIN: Final = 0.002
"""Difference in AUC, and in log loss, of two implementations of a model, set before the first run."""
PRECISION_MARGIN: Final = 0.0005
"""Difference in AUC that numerics may make, set before the first run with mixed precision."""

GOALS: Final[Sequence[Goal]] = [
    *_goals("preparation", Sense.AT_LEAST, ratio_to_torchrec=8, ratio_to_polars=0.95),
    *_goals("caching", Sense.AT_LEAST, second_epoch_speedup=5),
    *_goals("caching", Sense.AT_MOST, first_epoch_ratio=1),
    *_goals(
        "throughput",
        Sense.AT_LEAST,
        ratio_to_torchrec_best=2,
        ratio_to_torchrec_fp32=1.3,
        ratio_to_torchrec_keeping_memory=1.4,
        matmul_share=0.7,
    ),
    *_goals(
        "models",
        Sense.NOT_WORSE,
        "than the counterpart in TorchRec or DeepCTR-Torch",
        **{f"auc_minus_reference_{kind}": REFERENCE_MARGIN for kind in MODELS},
    ),
    *_goals(
        "models",
        Sense.AT_MOST,
        "minus that of the counterpart",
        **{f"log_loss_minus_reference_{kind}": REFERENCE_MARGIN for kind in MODELS},
    ),
    *_goals("precision", Sense.WITHIN, auc_bf16_minus_fp32=PRECISION_MARGIN),
    *_goals("memory_growth", Sense.AT_MOST, growth_bytes_per_1000_steps=0),
    *_goals(
        "checkpointing",
        Sense.AT_MOST,
        blocked_ratio_rolling=1 / 8,
        blocked_ratio_consistent=1 / 4,
        blocked_ratio_rolling_to_dcp_async=1,
        lost_ratio_to_dcp_async=1 / 2,
        row_save_blocked_share=1 / 6,
        peak_extra_bytes=512 * 1024**2,
    ),
    *_goals(
        "checkpointing", Sense.AT_LEAST, save_ratio_to_dcp=1.2, save_ratio_to_raw=0.8, load_ratio_to_dcp=1
    ),
    *_goals("checkpointing", Sense.AT_LEAST, throughput_while_saving=0.8),
    *_goals("recovery", Sense.AT_MOST, time_ratio_2=0.5, time_ratio_4=0.4),
    *_goals("full_size", Sense.AT_MOST, big_kill_ratio=0.08, big_memory_overhead=0.1, big_build_ratio=1.5),
    *_goals("shapes", Sense.AT_LEAST, worst_ratio_to_torchrec=1.2, worst_ratio_keeping_memory=1.2),
    *_goals("full_size", Sense.AT_LEAST, big_ratio_to_torchrec=1.5),
    *_goals("recovery_soak", Sense.WITHIN, soak_auc_delta=RESOLUTION),
    *_goals("recovery_soak", Sense.AT_MOST, soak_rows_wrong=0, soak_leftovers=0, soak_nodes_failed=0),
    *_goals("lost_nodes", Sense.WITHIN, mirror_auc_delta=RESOLUTION),
    *_goals("lost_nodes", Sense.AT_MOST, mirror_rows_wrong=0, mirror_steps_lost=1),
    *_goals("mirror", Sense.AT_MOST, mirror_step_share_25=0.05, mirror_step_share_priority_25=0.01),
    *_goals("mirror_recovery", Sense.AT_MOST, mirror_recovery_ratio=1),
    *_goals("tracking", Sense.AT_MOST, mfu_step_share=0.003, ssu_step_share=0.005),
    *_goals("overhead", Sense.AT_MOST, overhead_cpr_background=0.003, overhead_cpr_background_tracked=0.007),
    *_goals(
        "overhead",
        Sense.NOT_WORSE,
        "than no failure at all",
        auc_delta_mfu=RESOLUTION,
        auc_delta_mfu_sgd=RESOLUTION,
        auc_delta_mfu_dcnv2=RESOLUTION,
    ),
    *_goals(
        "splitting",
        Sense.AT_LEAST,
        "4 workers, 214 ids a sample, which are left out as in the paper",
        bytes_saved_lr=0.7226,
        bytes_saved_fm=0.7226,
        bytes_saved_deepfm=0.7226,
    ),
    *_goals("splitting", Sense.AT_LEAST, "ties count as hits", planner_hits_share=0.9),
    *_goals("splitting", Sense.AT_LEAST, auto_worst_ratio=0.97),
    *_goals("mstopk", Sense.AT_LEAST, mstopk_speedup_10m=3, mstopk_speedup_100m=3, mstopk_energy=0.99),
    *_goals("communication", Sense.AT_LEAST, auto_worst_ratio=0.97, wide_1gbps_speedup=1.25),
    *_goals("communication", Sense.NOT_WORSE, "than DDP", auc_delta_auto=PRECISION_MARGIN),
    *_goals(
        "pipeline",
        Sense.AT_LEAST,
        prefetch_speedup_1gbps=1.2,
        prefetch_worst_ratio=0.98,
        prefetch_hidden_share=0.7,
        waves_speedup_1gbps=1.2,
        waves_worst_ratio=0.98,
        waves_hidden_share=0.7,
        auto_worst_ratio=0.97,
    ),
    *_goals("pipeline", Sense.WITHIN, prefetch_auc_delta=0),
    *_goals("uneven", Sense.AT_LEAST, uneven_speedup_4x=1.8),
    *_goals("uneven", Sense.AT_MOST, even_cost_share=0.01, batch_changes_per_minute=1, follow_s=30),
    *_goals("uneven", Sense.NOT_WORSE, "than with equal batches", uneven_auc_delta=REFERENCE_MARGIN),
    *_goals("streaming", Sense.NOT_WORSE, "than from files", stream_auc_delta=REFERENCE_MARGIN),
    *_goals(
        "label_skew",
        Sense.NOT_WORSE,
        "than with mixed labels",
        skew_auc_delta_dense=REFERENCE_MARGIN,
        skew_auc_delta_topk=REFERENCE_MARGIN,
        dealt_auc_delta_dense=REFERENCE_MARGIN,
        dealt_auc_delta_topk=REFERENCE_MARGIN,
        all_dealt_auc_delta_dense=REFERENCE_MARGIN,
        all_dealt_auc_delta_topk=REFERENCE_MARGIN,
    ),
    *_goals(
        "streaming",
        Sense.AT_MOST,
        stream_lost_records=0,
        stream_repeated_records=0,
        stream_backlog_error=0.05,
        stream_lag_s=2,
    ),
    *_goals(
        "renting",
        Sense.AT_MOST,
        scavenger_time_error=0.05,
        scavenger_time_error_throttled=0.1,
        scavenger_noise_error=0.05,
        scavenger_regret=0.1,
    ),
]


def outcomes(results: Mapping[str, Result]) -> list[tuple[Goal, FigureValue, Outcome]]:
    """Every goal whose experiment is finished, with what was measured and whether it was reached.

    Raises:
        ValueError: a goal names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    measured = [
        (goal, finished[goal.experiment].measured(goal.figure))
        for goal in GOALS
        if goal.experiment in finished
    ]
    return [(goal, value, goal.outcome(value)) for goal, value in measured]
