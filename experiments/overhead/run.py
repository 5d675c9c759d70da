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
from typing import Final

from experiments.emulation.runs import run_experiment
from experiments.harness.record import RESULTS
from experiments.overhead.accounting import account
from experiments.overhead.picture import draw
from experiments.overhead.quality import plan, quality_figures

SEEDS: Final = 10


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
