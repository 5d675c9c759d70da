"""The overheads of `experiments.overhead`, by the paper's formulas, with its times and measured shares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from cpr.estimator.planning.formulas import (
    Overhead,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)
from experiments.emulation.emulation import PRODUCTION
from experiments.harness.record import Row, finished_result

TARGET_PLS: Final = 0.1
OFTEN_PLS: Final = 0.02
RATIO: Final = 0.125

FULL: Final = "overhead_full"
NAIVE: Final = "overhead_partial_naive"
CPR: Final = "overhead_cpr"
BACKGROUND: Final = "overhead_cpr_background"
OFTEN: Final = "overhead_cpr_background_often"
SLOWED: Final = "overhead_cpr_background_slowed"
TRACKED: Final = "overhead_cpr_background_tracked"


@dataclass(frozen=True)
class Account:
    """Overheads by name of their figure, and why some are missing."""

    overheads: dict[str, Overhead]
    missing: dict[str, str]
    tracking: float | None = None
    """Share of each step that MFU's counting takes; None: not measured."""

    def figures(self) -> dict[str, float | None]:
        """Each overhead and its parts, as shares of the training time."""
        figures: dict[str, float | None] = dict.fromkeys(self.missing)
        for name, overhead in self.overheads.items():
            figures[name] = overhead.total
            figures[f"{name}_save"] = overhead.save
            figures[f"{name}_lost"] = overhead.lost
            figures[f"{name}_recovery"] = overhead.load + overhead.reschedule
        if self.tracking is not None and SLOWED in self.overheads:
            figures[TRACKED] = self.overheads[SLOWED].total + self.tracking
        return figures


def account(results: Path) -> Account:
    """All overheads of the emulated job, with the measured shares of the stored results in a folder."""
    job, naive_s = PRODUCTION, interval_full(PRODUCTION)
    cpr_s, often_s = (interval_partial(job, target) for target in (TARGET_PLS, OFTEN_PLS))
    overheads = {
        FULL: overhead_full(job, naive_s),
        NAIVE: overhead_partial(job, naive_s),
        CPR: overhead_partial(job, cpr_s),
    }
    missing: dict[str, str] = {}
    saving = _rounds(results / "checkpointing.json")
    if saving:
        blocked, lost = (_share_of_a_save(saving, value) for value in ("blocked_s", "lost_s"))
        overheads[BACKGROUND] = _cheaper_saves(job_s=cpr_s, share=blocked)
        overheads[OFTEN] = _cheaper_saves(job_s=often_s, share=blocked)
        overheads[SLOWED] = _cheaper_saves(job_s=cpr_s, share=lost)
    else:
        why = "needs the stored result of checkpointing, which is absent or not finished"
        missing |= dict.fromkeys((BACKGROUND, OFTEN, SLOWED, TRACKED), why)
    tracking = finished_result(results / "tracking.json")
    if tracking is None:
        missing[TRACKED] = "needs the stored result of tracking, which is absent or not finished"
    return Account(overheads, missing, None if tracking is None else tracking["figures"]["mfu_step_share"])


def _cheaper_saves(job_s: float, share: float) -> Overhead:
    """CPR's overhead when a save of everything costs training only a share of the time that it takes."""
    return overhead_partial(replace(PRODUCTION, blocked_save=share * PRODUCTION.O_save), job_s)


def _share_of_a_save(rounds: Sequence[Row], value: str) -> float:
    """Median over rounds of the cost of row saves of all rows, as a share of a synchronous DCP save."""
    savers = [row["savers"] for row in rounds]
    return median(float(each["ours rows"][value] / each["dcp save"]["blocked_s"] / RATIO) for each in savers)


def _rounds(path: Path) -> list[Row]:
    """The rounds of a stored result; none if it is absent or not finished."""
    body = finished_result(path)
    return [] if body is None else [row for row in body["rows"] if "round" in row]
