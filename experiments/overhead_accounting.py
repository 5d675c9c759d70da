"""The overheads of `experiments.overhead`: the paper's formulas, with its times and with measured shares."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from cpr.estimator.formulas import Overhead, interval_full, interval_partial, overhead_full, overhead_partial
from experiments.emulation import PRODUCTION
from experiments.record import Row

TARGET_PLS: Final = 0.1
OFTEN_PLS: Final = 0.02
RATIO: Final = 0.125

FULL: Final = "overhead_full"
NAIVE: Final = "overhead_partial_naive"
CPR: Final = "overhead_cpr"
BACKGROUND: Final = "overhead_cpr_background"
OFTEN: Final = "overhead_cpr_background_often"
SLOWED: Final = "overhead_cpr_background_slowed"
OWN_RECOVERY: Final = "overhead_cpr_background_own_recovery"
LABELS: Final = {
    FULL: "full recovery",
    NAIVE: "partial, naive",
    CPR: "CPR: vanilla, SCAR,\nMFU, SSU",
    BACKGROUND: "CPR, saving in\nthe background",
    OFTEN: f"the same,\nPLS {OFTEN_PLS:g}",
    SLOWED: "background,\nslower steps counted",
    OWN_RECOVERY: "background and\nour own recovery",
}


@dataclass(frozen=True)
class Account:
    """Overheads by name of their figure, and why some are missing."""

    overheads: dict[str, Overhead]
    missing: dict[str, str]

    def figures(self) -> dict[str, float | None]:
        """Each overhead and its parts, as shares of the training time."""
        figures: dict[str, float | None] = dict.fromkeys(self.missing)
        for name, overhead in self.overheads.items():
            figures[name] = overhead.total
            figures[f"{name}_save"] = overhead.save
            figures[f"{name}_lost"] = overhead.lost
            figures[f"{name}_recovery"] = overhead.load + overhead.reschedule
        return figures


def account(results: Path) -> Account:
    """All overheads of the emulated job.

    Args:
        results: folder of the stored results, where the measured shares come from.
    """
    job, naive_s = PRODUCTION, interval_full(PRODUCTION)
    cpr_s, often_s = (interval_partial(job, target) for target in (TARGET_PLS, OFTEN_PLS))
    overheads = {
        FULL: overhead_full(job, naive_s),
        NAIVE: overhead_partial(job, naive_s),
        CPR: overhead_partial(job, cpr_s),
    }
    missing: dict[str, str] = {}
    saving, recovery = (
        _rounds(results / "checkpointing.json"),
        _figure(results / "recovery.json", "time_ratio_2"),
    )
    if saving:
        blocked, lost = (_share_of_a_save(saving, value) for value in ("blocked_s", "lost_s"))
        overheads[BACKGROUND] = _cheaper_saves(job_s=cpr_s, share=blocked)
        overheads[OFTEN] = _cheaper_saves(job_s=often_s, share=blocked)
        overheads[SLOWED] = _cheaper_saves(job_s=cpr_s, share=lost)
        if recovery is not None:
            background = overheads[BACKGROUND]
            overheads[OWN_RECOVERY] = replace(
                background, load=background.load * recovery, reschedule=background.reschedule * recovery
            )
    for name in (BACKGROUND, OFTEN, SLOWED, OWN_RECOVERY):
        if name not in overheads:
            needed = "checkpointing and recovery" if name == OWN_RECOVERY else "checkpointing"
            missing[name] = f"needs the stored results of {needed}, which are absent or not finished"
    return Account(overheads, missing)


def _cheaper_saves(job_s: float, share: float) -> Overhead:
    """CPR's overhead when a save of everything costs training only a share of the time that it takes."""
    return overhead_partial(replace(PRODUCTION, blocked_save=share * PRODUCTION.O_save), job_s)


def _share_of_a_save(rounds: Sequence[Row], value: str) -> float:
    """What the row saves that save all rows once cost training, over a synchronous save (DCP's): median."""
    savers = [row["savers"] for row in rounds]
    return median(float(each["ours rows"][value] / each["dcp save"]["blocked_s"] / RATIO) for each in savers)


def _rounds(path: Path) -> list[Row]:
    return _read(path, lambda body: [row for row in body["rows"] if "round" in row]) or []


def _figure(path: Path, name: str) -> float | None:
    found: float | None = _read(path, lambda body: body["figures"][name])
    return found


def _read(path: Path, take: Callable[[dict[str, Any]], Any]) -> Any:
    """Part of a stored result; None if it is absent or not finished."""
    body = json.loads(path.read_text()) if path.exists() else {"finished": None}
    return take(body) if body["finished"] else None
