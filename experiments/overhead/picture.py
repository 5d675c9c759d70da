"""The picture of `experiments.overhead`: what failures cost in time, and what they do to quality."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpr.estimator.planning.formulas import Overhead
from experiments.emulation.figures import TEN_THOUSANDTHS, Estimate
from experiments.overhead.accounting import LABELS


def draw(
    overheads: Mapping[str, Overhead], quality: Mapping[str, Mapping[str, Estimate]], path: Path
) -> None:
    """Bars of the overheads by part, and the difference in AUC of each scheme.

    Args:
        overheads: by name of the figure.
        quality: difference in AUC by scheme, by the legend's entry.
        path: of the picture.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_overheads(left, overheads)
    _draw_quality(right, quality)
    figure.savefig(path, dpi=150)


def _draw_overheads(axes: Axes, overheads: Mapping[str, Overhead]) -> None:
    names = [name for name in LABELS if name in overheads]
    places = range(len(names))
    bottom = [0.0] * len(names)
    parts = {
        "saving": [overheads[name].save for name in names],
        "work done again": [overheads[name].lost for name in names],
        "loading, getting a node": [overheads[name].load + overheads[name].reschedule for name in names],
    }
    for label, shares in parts.items():
        percent = [100 * share for share in shares]
        axes.barh(places, percent, left=bottom, label=label)
        bottom = [below + more for below, more in zip(bottom, percent, strict=True)]
    for place, total in zip(places, bottom, strict=True):
        axes.text(total + 0.08, place, f"{total:.2f} %", va="center", fontsize=8)
    axes.set_yticks(places, [LABELS[name] for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(bottom))
    axes.set_xlabel("overhead, % of training time, by the paper's formulas")
    axes.legend(fontsize=8, loc="lower right")


def _draw_quality(axes: Axes, quality: Mapping[str, Mapping[str, Estimate]]) -> None:
    schemes = list(next(iter(quality.values())))
    width = 0.8 / len(quality)
    axes.axhline(0, color="black", linewidth=0.8)
    for number, (label, by_scheme) in enumerate(quality.items()):
        places = [place + (number - (len(quality) - 1) / 2) * width for place in range(len(schemes))]
        axes.errorbar(
            places,
            [by_scheme[scheme].value * TEN_THOUSANDTHS for scheme in schemes],
            yerr=[by_scheme[scheme].ci * TEN_THOUSANDTHS for scheme in schemes],
            fmt="s",
            markersize=5,
            capsize=4,
            label=label,
        )
    axes.set_xticks(range(len(schemes)), schemes)
    axes.set_ylabel("AUC - AUC without failures, in 1e-4")
    axes.set_title("two failures in 56 h, mean over seeds and 95 % interval", fontsize=10)
    axes.legend(fontsize=8)
