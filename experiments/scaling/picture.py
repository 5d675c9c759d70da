"""The picture of `experiments.scaling`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from experiments.harness.record import Row
from experiments.scaling.jobs import LAWS

STYLES: Final = {
    "full": ("tab:red", "full recovery"),
    "full_background": ("tab:orange", "full, saves in the background"),
    "partial": ("tab:blue", "partial recovery"),
    "partial_background": ("tab:green", "partial, saves in the background"),
}
TITLES: Final = {
    "independent": "failures in proportion to the nodes",
    "milder": "failures with the square root of the nodes",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw overhead against nodes for both laws, and below how wrong the formulas are where.

    Args:
        rows: of the result.
        path: of the picture.
    """
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (left, right), (intervals, ways) = figure.subplots(2, 2)
    for axes, law in zip((left, right), LAWS, strict=True):
        _draw_nodes(axes, [row for row in rows if row["part"] == "nodes" and row["law"] == law])
        axes.set_title(TITLES[law], fontsize=10)
    left.legend(fontsize=8)
    right.sharey(left)
    _draw_ratios(intervals, rows)
    _draw_ways(ways, [row for row in rows if row["part"] == "way"])
    figure.savefig(path, dpi=150)


def _draw_nodes(axes: Any, rows: Sequence[Row]) -> None:
    """Lines: simulated, dotted: formula, crosses: not all runs came to their end."""
    for scheme, (color, label) in STYLES.items():
        mine = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row["nodes"])
        nodes = [row["nodes"] for row in mine]
        simulated = [100 * row["simulated"] for row in mine]
        reach = [100 * row["simulated_ci"] for row in mine]
        axes.errorbar(nodes, simulated, yerr=reach, color=color, marker="o", markersize=3, label=label)
        axes.plot(nodes, [100 * row["formula"] for row in mine], color=color, linestyle=":")
        cut = [place for place, row in enumerate(mine) if row["finished_share"] < 1]
        axes.plot([nodes[n] for n in cut], [simulated[n] for n in cut], "x", color=color, markersize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("nodes (dotted: by formula; crosses: runs given up)")
    axes.set_ylabel("overhead, % of the useful time")
    axes.grid(alpha=0.3)


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Simulated over formula, against what is to be far shorter than the time between failures."""
    lines = (
        ("interval", "full", "", "tab:red", "-", "full recovery; interval"),
        ("interval", "partial", "_pls", "tab:purple", "-", "PLS; interval"),
        ("duration", "full", "", "tab:red", "--", "full recovery; save and recovery"),
        ("duration", "partial", "", "tab:blue", "--", "partial recovery; save and recovery"),
    )
    for part, recovery, what, color, line, label in lines:
        mine = [row for row in rows if row["part"] == part]
        ratios = [row[recovery][f"simulated{what}"] / row[recovery][f"formula{what}"] for row in mine]
        axes.plot(
            [row["ratio"] for row in mine], ratios, line, color=color, marker="o", markersize=3, label=label
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("what it takes / mean time between failures")
    axes.set_ylabel("simulated / by formula")
    axes.set_title("Nothing may take long against the time between failures", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_ways(axes: Any, rows: Sequence[Row]) -> None:
    """Simulated over formula for ways to fail."""
    bars = (
        ("full", "simulated", "formula", "tab:red", "full recovery, overhead"),
        ("partial", "simulated", "formula", "tab:blue", "partial recovery, overhead"),
        ("partial", "simulated_pls", "formula_pls", "tab:purple", "partial recovery, PLS"),
    )
    for number, (recovery, over, under, color, label) in enumerate(bars):
        places = [place + 0.25 * (1 - number) for place in range(len(rows))]
        heights = [row[recovery][over] / row[recovery][under] for row in rows]
        reach = [row[recovery][f"{over}_ci"] / row[recovery][under] for row in rows]
        axes.barh(places, heights, 0.22, xerr=reach, color=color, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["way"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("simulated / by formula")
    axes.set_title("Failures that do not come one by one and at random", fontsize=10)
    axes.legend(fontsize=8)
