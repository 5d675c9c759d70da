"""What failures cost, and what partial recovery does to quality: `python -m experiments.overhead [DATASET]`.

The emulated job of the CPR paper, as it is recalled and was not read again: 56 hours, 2 failures, 8 nodes,
target PLS 0.1 (`experiments.emulation` says how). Overheads are counted by the paper's formulas, not lived
through. The paper's times of a save, a load and a new node are not known to us: ours are worked back from its
own percentages, so that the first three figures agree with it by construction. Quality is real: each run is
trained and tested. Interrupted, the command goes on where it stopped; `--seeds N` finishes with fewer, or
adds more; `--figures` measures nothing and works the figures out anew from the stored runs. Figures:

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
from statistics import mean
from typing import Final

from experiments.emulation.emulation import NAIVE, VANILLA, Run
from experiments.emulation.figures import NETWORKS, Estimate, estimates, run_of, setting_of
from experiments.emulation.runs import measure_experiment
from experiments.harness.record import RESULTS, Row
from experiments.overhead.accounting import OFTEN_PLS, RATIO, TARGET_PLS, account
from experiments.overhead.picture import draw

SEEDS: Final = 10
SCHEMES: Final = ("mfu", "ssu", "scar", VANILLA, NAIVE, "random", "never")
CHOOSING: Final = ("mfu", "ssu", "scar")
LEGEND: Final = {
    "": "DLRM, row-wise Adagrad",
    "_sgd": "DLRM, SGD",
    "_dcnv2": "DCN-v2, row-wise Adagrad",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    record = measure_experiment(
        "overhead", arguments, description=__doc__.split("\n", maxsplit=1)[0], plan=plan, seeds=SEEDS
    )
    accounted = account(RESULTS)
    figures = {**accounted.figures(), **quality_figures(record.rows)}
    path = record.finish(figures, accounted.missing)
    quality = {LEGEND[ending]: by_scheme(record.rows, ending) for ending in NETWORKS}
    draw(accounted.overheads, quality, path.with_suffix(".png"))
    for name, value in figures.items():
        print(f"{name}: {'not measured' if value is None else f'{value:.6f}'}")
    print(f"stored in {path}")
    return 0


def run(scheme: str, seed: int, ending: str = "", target_pls: float = TARGET_PLS) -> Run:
    """A run under the paper's setting."""
    network, optimizer = NETWORKS[ending]
    return Run(
        scheme=scheme,
        seed=seed,
        network=network,
        optimizer=optimizer,
        target_pls=target_pls,
        ratio=RATIO,
    )


def plan(seed: int) -> list[Run]:
    """The runs of a seed: what the headline is about first."""
    runs = []
    for ending in NETWORKS:
        runs += [run(scheme, seed, ending) for scheme in SCHEMES]
        runs.insert(len(runs) - len(SCHEMES), runs[-1].without_failures)
    return [*runs, run("mfu", seed, target_pls=OFTEN_PLS)]


def by_scheme(rows: Sequence[Row], ending: str) -> dict[str, Estimate]:
    """The difference in AUC of each scheme under the paper's setting."""
    found = estimates(rows)
    return {scheme: found[setting_of(run(scheme, 0, ending))] for scheme in SCHEMES}


def quality_figures(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of quality."""
    figures: dict[str, float] = {}
    for ending in NETWORKS:
        for scheme, estimate in by_scheme(rows, ending).items():
            figures |= estimate.figures(f"auc_delta_{scheme}{ending}")
    often = estimates(rows)[setting_of(run("mfu", 0, target_pls=OFTEN_PLS))]
    written = {scheme: _mean_of(rows, "rows_saved", run(scheme, 0)) for scheme in (*CHOOSING, "random")}
    used = {f"budget_used_{scheme}": written[scheme] / written["random"] for scheme in CHOOSING}
    return {
        **figures,
        **often.figures("auc_delta_mfu_often"),
        **used,
        "auc_without_failures": _mean_of(rows, "auc", run(NAIVE, 0).without_failures),
        "pls_vanilla": _mean_of(rows, "pls", run(VANILLA, 0)),
    }


def _mean_of(rows: Sequence[Row], value: str, setting: Run) -> float:
    return mean(float(row[value]) for row in rows if setting_of(run_of(row)) == setting)
