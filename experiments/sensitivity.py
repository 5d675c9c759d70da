"""What the loss of quality depends on: `python -m experiments.sensitivity [DATASET] [--quick]`.

The emulated job of `experiments.overhead`, with one thing changed at a time: number of failures (the interval
follows it, so that the expected PLS stays), nodes lost at once (the interval does not know of it, so that the
PLS grows), share r of the rows that a save takes, sampling period of SSU, skew of the ids, optimizer, and
schemes besides the paper's. Interrupted, the command resumes where it stopped; `--seeds N` finishes with
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

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.emulation.emulation import VANILLA, Run
from experiments.emulation.figures import (
    SCHEME_NAMES,
    estimates,
    run_of,
    setting_of,
)
from experiments.emulation.runs import run_experiment
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate

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
"""Fields of `Run` that a case changes, and its schemes, by the ending of figures; the important first."""

LABELS: Final = {
    "usual": "as usual: 2 failures of one of\n8 nodes, 1/8 of the rows a save,\nSSU looks at 1 of 2 ids",
    "failures_": "number of failures: {}",
    "nodes_": "{} nodes lost at once",
    "ratio_1_": "1/{} of the rows a save",
    "skew_": "top 1 % of ids has\n{} % of the accesses (usual: 75)",
    "period_": "SSU looks at 1 of {} ids",
    "sgd": "tables by SGD",
    "adagrad": "tables by Adagrad",
}
"""Labels of the cases in the picture, by how their names begin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    return run_experiment(
        "sensitivity",
        arguments,
        description=__doc__,
        plan=plan,
        seeds=SEEDS,
        figures_of=figures_of,
        draw=draw,
    )


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


def draw(result: Row, folder: Path) -> None:
    """Draw every difference with its interval, change by change, with DCN-v2 in a panel of its own."""
    found = measured(result["rows"])
    panels = [[name for name in found if name.endswith("_dcnv2") == is_dcn] for is_dcn in (False, True)]
    figure = Figure(figsize=(13, 9), layout="constrained")
    for axes, names in zip(figure.subplots(1, 2, sharex=True), panels, strict=True):
        _draw_changes(axes, {name: found[name] for name in names})
    left, right = figure.axes
    left.set_title("DLRM", fontsize=10)
    right.set_title("DCN-v2", fontsize=10)
    figure.suptitle(
        "Accuracy after failures, one thing changed at a time, by what is saved first", fontsize=11
    )
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    figure.savefig(folder / "sensitivity.png", dpi=110)


def _draw_changes(axes: Axes, found: Mapping[str, Mapping[str, Estimate]]) -> None:
    """Draw a block of lines for each change, as high as it has schemes, so that no two lines overlap."""
    axes.axvline(0, color="black", linewidth=0.8)
    colors = {scheme: f"C{number}" for number, scheme in enumerate((*PAPER, *OTHERS))}
    place, middles, labelled = 0.0, [], set()
    for number, by_scheme in enumerate(found.values()):
        top = place
        for scheme, estimate in by_scheme.items():
            label = None if scheme in labelled else SCHEME_NAMES[scheme]
            labelled.add(scheme)
            value, reach = estimate.value * TEN_THOUSANDTHS, estimate.half_width * TEN_THOUSANDTHS
            axes.errorbar(
                value, place, xerr=reach, fmt="s", markersize=4, capsize=3, color=colors[scheme], label=label
            )
            place += 1
        middles.append((top + place - 1) / 2)
        if number % 2 == 0:
            axes.axhspan(top - 0.75, place - 0.25, color="black", alpha=0.05, linewidth=0)
        place += 0.5
    axes.set_xlabel("AUC - AUC without failures, in 1e-4 (95 % interval)")
    axes.set_yticks(middles, [_label(name) for name in found], fontsize=9)
    axes.set_ylim(place - 0.25, -1)


def _label(name: str) -> str:
    name = name.removesuffix("_dcnv2")
    texts = [
        text.format(name.removeprefix(start)) for start, text in LABELS.items() if name.startswith(start)
    ]
    return texts[0] if texts else name


if __name__ == "__main__":
    raise SystemExit(main())
