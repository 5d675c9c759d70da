"""What the loss of quality depends on: `python -m experiments.sensitivity [DATASET] [--quick]`.

The emulated job of `experiments.overhead`, with one thing changed at a time: number of failures (the interval
follows it, so that the expected PLS stays), nodes lost at once (the interval does not know of it, so that the
PLS grows), share r of the rows that a save takes, sampling period of SSU, skew of the ids, optimizer, and
schemes besides the paper's. Interrupted, the command goes on where it stopped; `--seeds N` finishes with
fewer, or adds more. Figures, mean over seeds, with half the 95 % interval under `..._ci`:

- `auc_delta_SCHEME_CHANGE`: AUC minus that of the same run without failures. Changes: `usual` (2 failures, 1
  node, r = 1/8, period 2, row-wise Adagrad, 75 % of the accesses to the top percent of ids), `failures_1`,
  `failures_8`, `failures_20`, `nodes_2`, `nodes_4`, `ratio_1_32`, `ratio_1_2`, `period_1`, `period_8`,
  `skew_50`, `skew_90`, `sgd`, `adagrad`, and some of them once more for DCN-v2, `..._dcnv2`. Changes of the
  data need the default data set; with other data they are left out.
- `pls_CHANGE`: mean PLS measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from matplotlib.figure import Figure

from experiments.emulation.emulation import VANILLA, Run
from experiments.emulation.figures import TEN_THOUSANDTHS, Estimate, estimates, run_of, setting_of
from experiments.emulation.runs import finish_experiment, measure_experiment
from experiments.harness.record import Row

SEEDS: Final = 6
PAPER: Final = ("mfu", "ssu", VANILLA)
OTHERS: Final = ("random", "mru", "round_robin", "touched")
CHANGES: Final[Mapping[str, tuple[Mapping[str, Any], Sequence[str]]]] = {
    "usual": ({}, (*PAPER, *OTHERS)),
    "failures_20": ({"failures": 20}, PAPER),
    "nodes_4": ({"nodes_lost": 4}, PAPER),
    "ratio_1_32": ({"ratio": 1 / 32}, ("mfu", "ssu", "random")),
    "ratio_1_2": ({"ratio": 1 / 2}, ("mfu", "ssu")),
    "skew_50": ({"top_coverage": 0.5}, PAPER),
    "skew_90": ({"top_coverage": 0.9}, PAPER),
    "period_1": ({"sampling_period": 1}, ("ssu",)),
    "period_8": ({"sampling_period": 8}, ("ssu",)),
    "sgd": ({"optimizer": "sgd"}, PAPER),
    "adagrad": ({"optimizer": "adagrad"}, PAPER),
    "failures_8": ({"failures": 8}, PAPER),
    "failures_1": ({"failures": 1}, PAPER),
    "nodes_2": ({"nodes_lost": 2}, PAPER),
    "usual_dcnv2": ({"network": "dcnv2"}, PAPER),
    "failures_20_dcnv2": ({"network": "dcnv2", "failures": 20}, PAPER),
    "nodes_4_dcnv2": ({"network": "dcnv2", "nodes_lost": 4}, PAPER),
    "ratio_1_32_dcnv2": ({"network": "dcnv2", "ratio": 1 / 32}, ("mfu", "ssu")),
    "skew_90_dcnv2": ({"network": "dcnv2", "top_coverage": 0.9}, PAPER),
    "sgd_dcnv2": ({"network": "dcnv2", "optimizer": "sgd"}, PAPER),
}
"""What is changed, and for which schemes, by the ending of the figures; those that matter most come first."""

LABELS: Final = {
    "failures_": "{} failure(s)",
    "nodes_": "{} nodes at once",
    "ratio_1_": "r = 1/{}",
    "skew_": "top 1 % has {} %",
    "period_": "SSU: 1 id of {}",
}
"""Of changes in the picture, by how their names begin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    record = measure_experiment(
        "sensitivity", arguments, description=__doc__.split("\n", maxsplit=1)[0], plan=plan, seeds=SEEDS
    )
    return finish_experiment(record, figures_of, draw)


def plan(seed: int) -> list[Run]:
    """The runs of a seed, each change with the run without failures that it is compared with."""
    changed = [
        Run(scheme=scheme, seed=seed, **change) for change, schemes in CHANGES.values() for scheme in schemes
    ]
    return list(dict.fromkeys(run for each in changed for run in (each.without_failures, each)))


def measured(rows: Sequence[Row]) -> dict[str, dict[str, Estimate]]:
    """The difference in AUC by change and scheme; changes that were not measured are absent."""
    found = estimates(rows)
    by_change = {
        name: {
            scheme: found[run] for scheme in schemes if (run := Run(scheme=scheme, seed=0, **change)) in found
        }
        for name, (change, schemes) in CHANGES.items()
    }
    return {name: by_scheme for name, by_scheme in by_change.items() if by_scheme}


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for name, by_scheme in measured(rows).items():
        for scheme, estimate in by_scheme.items():
            figures |= estimate.figures(f"auc_delta_{scheme}_{name}")
        change, schemes = CHANGES[name]
        run = Run(scheme=schemes[0], seed=0, **change)
        figures[f"pls_{name}"] = mean(float(row["pls"]) for row in rows if setting_of(run_of(row)) == run)
    return figures


def draw(rows: Sequence[Row], path: Path) -> None:
    """Every difference with its interval, change by change."""
    found = measured(rows)
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    for number, scheme in enumerate((*PAPER, *OTHERS)):
        places = [place for place, by_scheme in enumerate(found.values()) if scheme in by_scheme]
        of_scheme = [by_scheme[scheme] for by_scheme in found.values() if scheme in by_scheme]
        axes.errorbar(
            [estimate.value * TEN_THOUSANDTHS for estimate in of_scheme],
            [place + (number - 2.5) * 0.13 for place in places],
            xerr=[estimate.ci * TEN_THOUSANDTHS for estimate in of_scheme],
            fmt="s",
            markersize=4,
            capsize=3,
            label=scheme,
        )
    axes.set_yticks(range(len(found)), [_label(name) for name in found])
    axes.invert_yaxis()
    axes.set_xlabel("AUC - AUC without failures, in 1e-4: mean over seeds and 95 % interval")
    axes.legend(fontsize=8, loc="center left")
    figure.savefig(path, dpi=150)


def _label(name: str) -> str:
    if name.endswith("_dcnv2"):
        return f"DCN-v2: {_label(name.removesuffix('_dcnv2'))}"
    texts = [
        text.format(name.removeprefix(start)) for start, text in LABELS.items() if name.startswith(start)
    ]
    return texts[0] if texts else name


if __name__ == "__main__":
    raise SystemExit(main())
