"""Who pays for the failures? AUC by how common the ids are: `python -m experiments.rare_rows [DATASET]`.

Priority saving keeps common rows fresh and leaves rare ones stale. So the samples of the test day are cut in
thirds by how often the ids that they have in the large tables were seen in training (mean of the logarithms):
tail, torso and head. A third's AUC is of its own samples alone. Two jobs: that of `experiments.overhead` with
its 2 failures, and one with 8 failures at target PLS 0.4 (as in `experiments.pls_auc`), where there is more
to see; that one with SGD and for DCN-v2, too. Interrupted, the command resumes where it stopped; `--seeds N`
finishes with fewer, or adds more. Figures:

- `auc_delta_SCHEME_SLICE`, with `..._ci`: AUC minus that of the run without failures, 2 failures; mean over
  seeds and half its 95 % interval. `..._8_failures`: with 8; `..._sgd`: with 8 and SGD; `..._dcnv2`: with 8,
  of DCN-v2.
- `tail_minus_head_SCHEME`, with `..._ci`: that of the tail minus that of the head within a seed, with 8
  failures: below 0, samples of rare ids pay more. `..._sgd`: with SGD; `..._dcnv2`: of DCN-v2.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.emulation.data import SLICES
from experiments.emulation.emulation import VANILLA, Run
from experiments.emulation.figures import (
    NETWORK_NAMES,
    SCHEME_NAMES,
    by_setting,
    deltas,
    estimates,
)
from experiments.emulation.runs import run_experiment
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate

SEEDS: Final = 6
SCHEMES: Final = ("mfu", VANILLA, "ssu", "scar", "random", "never")
OFTEN: Final[Mapping[str, Any]] = {"failures": 8, "target_pls": 0.4}
JOBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": {"failures": 2, "target_pls": 0.1},
    "_8_failures": OFTEN,
    "_sgd": {**OFTEN, "optimizer": "sgd"},
    "_dcnv2": {**OFTEN, "network": "dcnv2"},
}
"""Jobs by the ending of the figures."""
COMPARED: Final[Mapping[str, str]] = {"_8_failures": "", "_sgd": "_sgd", "_dcnv2": "_dcnv2"}
"""Jobs whose tail is compared with the head, and the ending of those figures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    return run_experiment(
        "rare_rows",
        arguments,
        description=__doc__,
        plan=plan,
        seeds=SEEDS,
        figures_of=figures_of,
        draw=draw,
    )


def plan(seed: int) -> list[Run]:
    """The runs of a seed."""
    runs = [Run(scheme=scheme, seed=seed, **job) for job in JOBS.values() for scheme in SCHEMES]
    return list(dict.fromkeys(run for each in runs for run in (each.without_failures, each)))


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for part in SLICES:
        found = estimates(rows, f"auc_{part}")
        for ending, job in JOBS.items():
            for scheme in SCHEMES:
                estimate = found[Run(scheme=scheme, seed=0, **job)]
                figures |= estimate.figures(f"auc_delta_{scheme}_{part}{ending}")
    tails, heads = (by_setting(deltas(rows, f"auc_{part}")) for part in ("tail", "head"))
    for name, ending in COMPARED.items():
        for scheme in SCHEMES:
            run = Run(scheme=scheme, seed=0, **JOBS[name])
            differences = [tail - head for tail, head in zip(tails[run], heads[run], strict=True)]
            figures |= Estimate.of(differences).figures(f"tail_minus_head_{scheme}{ending}")
    return figures


def draw(result: Row, folder: Path) -> None:
    """Draw the difference in AUC of each third of the test samples, by scheme, in a panel for each job."""
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    for axes, (ending, job) in zip(figure.subplots(2, len(JOBS) // 2).flat, JOBS.items(), strict=True):
        _draw_job(axes, result["rows"], [Run(scheme=scheme, seed=0, **job) for scheme in SCHEMES])
        model = NETWORK_NAMES[COMPARED.get(ending, "")]
        axes.set_title(f"{model}: {job['failures']} failures, target PLS {job['target_pls']:g}", fontsize=10)
    figure.suptitle(
        "Which test samples lose accuracy after failures: those of rare or of common ids, by what is saved "
        "first",
        fontsize=11,
    )
    figure.supylabel("AUC of a third of the test samples - AUC without failures, in 1e-4", fontsize=10)
    legend = figure.axes[0].get_legend_handles_labels()
    figure.legend(*legend, fontsize=9, ncols=len(SLICES), loc="outside lower center")
    figure.savefig(folder / "rare_rows.png", dpi=110)


def _draw_job(axes: Axes, rows: Sequence[Row], runs: Sequence[Run]) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    for number, part in enumerate(SLICES):
        found = estimates(rows, f"auc_{part}")
        axes.errorbar(
            [place + (number - 1) * 0.22 for place in range(len(runs))],
            [found[run].value * TEN_THOUSANDTHS for run in runs],
            yerr=[found[run].half_width * TEN_THOUSANDTHS for run in runs],
            fmt="s",
            capsize=4,
            label=f"{part}: the third with the {('rarest', 'middling', 'most common')[number]} ids",
        )
    names = [fill(SCHEME_NAMES[run.scheme], width=15) for run in runs]
    axes.set_xticks(range(len(runs)), names, fontsize=7)


if __name__ == "__main__":
    raise SystemExit(main())
