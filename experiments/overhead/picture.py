"""The picture of `experiments.overhead`: what failures cost in time, and what they do to accuracy."""

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.emulation.figures import NETWORK_NAMES, SCHEME_NAMES
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import RESULTS, Row
from experiments.harness.statistics import Estimate
from experiments.overhead.accounting import BACKGROUND, CPR, FULL, NAIVE, SLOWED, Account, account
from experiments.overhead.quality import by_scheme

LABELS: Final = {
    FULL: "full recovery,\nat its best interval",
    NAIVE: "partial recovery,\nat the same interval",
    CPR: "CPR: as few saves as\na PLS of 0.1 allows",
    BACKGROUND: "CPR, saves in\nthe background",
    SLOWED: "and slower steps\ncounted",
}
COUNTED: Final = "and MFU's counting\nof accesses"


def draw(result: Row, folder: Path) -> None:
    """Draw the overheads by part, and the difference in AUC of each scheme."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_overheads(left, account(RESULTS))
    _draw_quality(right, {name: by_scheme(result["rows"], ending) for ending, name in NETWORK_NAMES.items()})
    figure.suptitle(
        "A job of 56 h on 8 nodes with 2 failures: what they cost in time and accuracy", fontsize=11
    )
    figure.savefig(folder / "overhead.png", dpi=110)


def _draw_overheads(axes: Axes, accounted: Account) -> None:
    names = [name for name in LABELS if name in accounted.overheads]
    shown = [accounted.overheads[name] for name in names]
    labels = [LABELS[name] for name in names]
    counting = [0.0] * len(shown)
    if SLOWED in names and accounted.tracking is not None:
        shown, labels, counting = [*shown, shown[-1]], [*labels, COUNTED], [*counting, accounted.tracking]
    parts = {
        "saving": [overhead.save for overhead in shown],
        "work done again": [overhead.lost for overhead in shown],
        "loading, getting a node": [overhead.load + overhead.reschedule for overhead in shown],
        "counting which rows are used": counting,
    }
    bottom = [0.0] * len(shown)
    for label, shares in parts.items():
        percent = [100 * share for share in shares]
        axes.barh(range(len(shown)), percent, left=bottom, label=label)
        bottom = [below + more for below, more in zip(bottom, percent, strict=True)]
    for place, total in enumerate(bottom):
        axes.text(total + 0.08, place, f"{total:.2f} %", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(bottom))
    axes.set_xlabel("% of training time")
    axes.set_title(
        "Overhead, by the paper's formulas (the first three bars agree with\n"
        "the paper by construction: its times were worked back from them)",
        fontsize=9,
    )
    axes.legend(fontsize=8, loc="lower right")


def _draw_quality(axes: Axes, quality: dict[str, dict[str, Estimate]]) -> None:
    schemes = list(next(iter(quality.values())))
    axes.axvline(0, color="black", linewidth=0.8)
    for number, (label, estimates) in enumerate(quality.items()):
        axes.errorbar(
            [estimates[scheme].value * TEN_THOUSANDTHS for scheme in schemes],
            [place + (number - (len(quality) - 1) / 2) * 0.25 for place in range(len(schemes))],
            xerr=[estimates[scheme].ci * TEN_THOUSANDTHS for scheme in schemes],
            fmt="s",
            markersize=4,
            capsize=3,
            label=label,
        )
    axes.set_yticks(
        range(len(schemes)), [SCHEME_NAMES[each].replace(": ", ":\n") for each in schemes], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlabel("AUC - AUC without failures, in 1e-4")
    axes.set_title(
        "Accuracy by what is saved, measured by training\n(mean over seeds, 95 % interval)", fontsize=9
    )
    axes.legend(fontsize=8, loc="upper left")
