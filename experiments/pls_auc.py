"""How the loss of quality grows with the portion of lost samples: `python -m experiments.pls_auc [DATASET]`.

The emulated job of `experiments.overhead` with 8 failures instead of 2, so that a run tells more, at target
PLS from 0.05 to 0.4. What a run is drawn at is its measured PLS, which depends on when its failures come. PLS
counts as if everything was saved every T_save, for all schemes: a gentler slope is what choosing rows gains.
Interrupted, the command resumes where it stopped; `--seeds N` finishes with fewer, or adds more; `--figures`
measures nothing and works the figures out again from the stored runs. Figures:

- `slope_SCHEME`, with `..._ci`: AUC lost for each unit of PLS, on a line through the origin fitted to the
  runs of each seed; mean over seeds and half its 95 % interval. `random` saves rows drawn at random: `mfu`
  against it shows what choosing gains. `..._sgd`: with SGD; `..._dcnv2`: for DCN-v2, all the others being for
  DLRM with row-wise Adagrad.
- `loss_never`, with `..._ci`: AUC lost where none of the large tables is ever saved, and the small ones as
  often as in all schemes but `vanilla`. A failure then costs all that a node has learned, whatever the
  interval, so that this loss has no slope; mean over all targets of a seed, and over seeds. `..._sgd`,
  `..._dcnv2` as above.
- `pls_auc_correlation`: Pearson's, of PLS and AUC lost over the runs of vanilla; `correlation_SCHEME`: the
  same for the others. `..._low`, `..._high`: 95 % interval, of a jackknife over seeds.
- `loss_ratio_mfu_to_random`, `loss_ratio_mfu_to_never`, `loss_ratio_mfu_to_vanilla`, with `..._ci`: of AUC
  lost, over all runs of a seed; mean over seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.emulation.emulation import VANILLA, Run
from experiments.emulation.figures import (
    NETWORK_NAMES,
    NETWORKS,
    SCHEME_NAMES,
    correlation,
    deltas,
    run_of,
    slope,
)
from experiments.emulation.runs import run_experiment
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate

SEEDS: Final = 6
FAILURES: Final = 8
TARGETS: Final = (0.4, 0.1, 0.2, 0.05)
NEVER: Final = "never"
SCHEMES: Final = ("mfu", VANILLA, "ssu", "scar", "random", NEVER)
RIVALS: Final = ("random", NEVER, VANILLA)

BANDS: Final = {"mfu": "95 % interval of MFU's line", VANILLA: "95 % interval of all rows alike"}

Points = dict[Run, tuple[float, float]]
"""PLS and AUC lost of each run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    return run_experiment(
        "pls_auc",
        arguments,
        description=__doc__,
        plan=plan,
        seeds=SEEDS,
        figures_of=figures_of,
        draw=draw,
    )


def plan(seed: int) -> list[Run]:
    """The runs of a seed."""
    runs = [
        Run(
            scheme=scheme,
            seed=seed,
            network=network,
            optimizer=optimizer,
            failures=FAILURES,
            target_pls=target,
        )
        for network, optimizer in NETWORKS.values()
        for target in TARGETS
        for scheme in SCHEMES
    ]
    return [*dict.fromkeys(run.without_failures for run in runs), *runs]


def points_of(rows: Sequence[Row], scheme: str, ending: str = "") -> Points:
    """PLS and AUC lost of the runs of a scheme."""
    pls = {run_of(row): row["pls"] for row in rows}
    return {
        run: (pls[run], -delta)
        for run, delta in deltas(rows).items()
        if (run.scheme, run.network, run.optimizer) == (scheme, *NETWORKS[ending])
    }


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for ending in NETWORKS:
        for scheme in SCHEMES:
            points = points_of(rows, scheme, ending)
            if scheme == NEVER:
                figures |= mean_loss(points).figures(f"loss_never{ending}")
                continue
            figures |= slope(points).figures(f"slope_{scheme}{ending}")
            name = "pls_auc_correlation" if scheme == VANILLA else f"correlation_{scheme}"
            figures |= correlation(points).figures(f"{name}{ending}")
    mfu = _lost_by_seed(points_of(rows, "mfu"))
    for rival in RIVALS:
        lost = _lost_by_seed(points_of(rows, rival))
        ratio = Estimate.of([mfu[seed] / lost[seed] for seed in lost])
        figures |= ratio.figures(f"loss_ratio_mfu_to_{rival}")
    return figures


def mean_loss(points: Points) -> Estimate:
    """AUC lost by a run, whatever its PLS: mean over the runs of a seed, and over seeds."""
    seeds = {run.seed for run in points}
    by_seed = {seed: [lost for run, (_, lost) in points.items() if run.seed == seed] for seed in seeds}
    return Estimate.of([mean(losses) for losses in by_seed.values()])


def _lost_by_seed(points: Points) -> dict[int, float]:
    lost: dict[int, float] = {}
    for run, (_, loss) in points.items():
        lost[run.seed] = lost.get(run.seed, 0.0) + loss
    return lost


def draw(result: Row, folder: Path) -> None:
    """Draw each run as a point and each scheme as a fitted line, in a panel for each network."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    for axes, ending in zip(panels, NETWORKS, strict=True):
        _draw_network(axes, {scheme: points_of(result["rows"], scheme, ending) for scheme in SCHEMES})
        axes.set_title(NETWORK_NAMES[ending], fontsize=10)
    panels[0].set_ylabel("AUC lost against no failure, in 1e-4")
    figure.suptitle(
        f"Accuracy lost over the portion of lost samples (PLS), {FAILURES} failures: what is saved first "
        f"decides",
        fontsize=11,
    )
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(folder / "pls_auc.png", dpi=110)


def _draw_network(axes: Axes, points: Mapping[str, Points]) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    for number, (scheme, of_scheme) in enumerate(points.items()):
        pls, lost = np.array(list(of_scheme.values())).T
        color, line = f"C{number}", np.array([0, pls.max()])
        fitted, shape = (mean_loss(of_scheme), np.ones(2)) if scheme == NEVER else (slope(of_scheme), line)
        style = "--" if scheme == NEVER else "-"
        axes.plot(pls, lost * TEN_THOUSANDTHS, "o", color=color, markersize=4, alpha=0.6)
        axes.plot(
            line, fitted.value * shape * TEN_THOUSANDTHS, style, color=color, label=SCHEME_NAMES[scheme]
        )
        if scheme in BANDS:  # six bands over each other would hide the points
            low, high = (
                bound * shape * TEN_THOUSANDTHS
                for bound in (fitted.value - fitted.half_width, fitted.value + fitted.half_width)
            )
            axes.fill_between(line, low, high, color=color, alpha=0.15, linewidth=0, label=BANDS[scheme])
    axes.set_xlabel("portion of lost samples (PLS), measured")


if __name__ == "__main__":
    raise SystemExit(main())
