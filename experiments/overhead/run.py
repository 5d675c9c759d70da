"""What failures cost, and what partial recovery does to quality: `python -m experiments.overhead [DATASET]`.

The emulated job of the CPR paper, as it is recalled and was not read again: 56 hours, 2 failures, 8 nodes,
target PLS 0.1 (`experiments.emulation` says how). Overheads are computed by the paper's formulas, not
measured. The paper's times of a save, a load and a new node are not known to us: ours are worked back from
its own percentages, so that the first three figures agree with it by construction. Accuracy is measured: each
run is trained and tested. Interrupted, the command resumes where it stopped; `--seeds N` finishes with fewer,
or adds more; `--figures` measures nothing and works the figures out again from the stored runs. Figures:

- `overhead_full`, `overhead_partial_naive`, `overhead_cpr`: share of the training time, with synchronous
  saves, and its parts, `..._save`, `..._lost` (work done again) and `..._recovery` (loading, getting a node).
- `overhead_cpr_background`: of CPR when saves are written in the background and training waits only as long
  as measured (`experiments.checkpointing`). Recovery costs what it does above, which alone is 0.32 %.
  `overhead_cpr_background_slowed` counts as well what training is slowed down meanwhile, on two cores;
  `overhead_cpr_background_tracked` besides that what MFU's counting costs every step
  (`experiments.tracking`), which the paper's percentages leave out as the ones above do.
- `auc_delta_SCHEME`, with `..._ci`: AUC on the test day minus that of the same run without failures, which is
  how full recovery ends; mean over seeds and half its 95 % interval (Student's t), for row-wise Adagrad.
  `..._sgd`, `..._dcnv2`: for SGD, and for DCN-v2 with row-wise Adagrad. `random` rows and `never` (of the
  large tables nothing is saved, the small ones are) show what choosing rows is worth. `auc_delta_mfu_often`:
  MFU with a target PLS of 0.02, which background saving makes cheap (`overhead_cpr_background_often`).
  `auc_delta_naive_ci` shows what the default data resolve, 0.5 million samples to train on and 0.1 million
  to test with, in tables of 0.68 million rows: that scheme loses next to nothing, so that what is left is
  chance. The interval of a scheme that does lose is wider, since that depends on when its failures come.
  A save in the background counts some minutes later, which is less than a step of the emulation.
- `budget_used_SCHEME`: rows that the scheme's saves wrote over those that they might (`random` writes them).
  Below 1, some tables had fewer candidates than places: for MFU, all their rows that changed were saved, and
  its priority is little more than incremental saving; SSU passes by part of what changed.
- `auc_without_failures`, `pls_vanilla`: means over seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.emulation.figures import NETWORK_NAMES, SCHEME_NAMES
from experiments.emulation.runs import run_experiment
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import RESULTS, Row
from experiments.harness.statistics import Estimate
from experiments.overhead.accounting import BACKGROUND, CPR, FULL, NAIVE, SLOWED, Account, account
from experiments.overhead.quality import by_scheme, plan, quality_figures

SEEDS: Final = 10
LABELS: Final = {
    FULL: "full recovery,\nat its best interval",
    NAIVE: "partial recovery,\nat the same interval",
    CPR: "CPR: as few saves as\na PLS of 0.1 allows",
    BACKGROUND: "CPR, saves in\nthe background",
    SLOWED: "and slower steps\ncounted",
}
COUNTED: Final = "and MFU's counting\nof accesses"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    accounted = account(RESULTS)
    return run_experiment(
        "overhead",
        arguments,
        description=__doc__,
        plan=plan,
        seeds=SEEDS,
        figures_of=lambda rows: {**accounted.figures(), **quality_figures(rows)},
        draw=draw,
        notes=accounted.missing,
    )


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
            xerr=[estimates[scheme].half_width * TEN_THOUSANDTHS for scheme in schemes],
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
