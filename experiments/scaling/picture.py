"""The picture of `experiments.scaling`: overhead against nodes, and where the paper's formulas fail."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from experiments.harness.record import Row
from experiments.scaling.jobs import LAWS

STYLES: Final = {
    "full": ("tab:red", "full recovery"),
    "full_background": ("tab:orange", "full recovery, saves in the background"),
    "partial": ("tab:blue", "partial recovery"),
    "partial_background": ("tab:green", "partial recovery, saves in the background"),
}
TITLES: Final = {
    "independent": "Nodes fail independently: twice the nodes, twice the failures",
    "milder": "Failures grow with the square root of the nodes",
}
WAYS: Final = {
    "at random": "one by one, at random",
    "gamma 0.3: in bursts": "in bursts\n(gamma, shape 0.3)",
    "gamma 3: regular": "regularly\n(gamma, shape 3)",
    "Weibull 0.7": "somewhat in bursts\n(Weibull, shape 0.7)",
    "Weibull 0.7,\neach node": "the same for each\nnode by itself",
    "1 in 10 takes\n8 nodes": "1 in 10 takes\n8 of 64 nodes",
}
"""Ways to fail, by their name in rows."""
CUT_NAME: Final = "some runs given up at 10 times their useful time"


def draw(result: Row, folder: Path) -> None:
    """Draw overhead against nodes for both laws of failure, and below how wrong the formulas are where."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    (left, right), (intervals, ways) = figure.subplots(2, 2)
    for axes, law in zip((left, right), LAWS, strict=True):
        _draw_nodes(axes, [row for row in result["rows"] if row["part"] == "nodes" and row["law"] == law])
        axes.set_title(TITLES[law], fontsize=10)
    right.sharey(left)
    right.legend(fontsize=8, loc="upper left")  # where the other panel has lines
    _draw_ratios(intervals, result["rows"])
    _draw_ways(ways, [row for row in result["rows"] if row["part"] == "way"])
    figure.suptitle(
        "Overhead of failures and saves over the number of nodes (top), and where formulas for it fail "
        "(bottom)",
        fontsize=11,
    )
    figure.savefig(folder / "scaling.png", dpi=100)


def _draw_nodes(axes: Any, rows: Sequence[Row]) -> None:
    """Draw what was simulated as lines, the formulas dotted, and crosses where runs were given up."""
    for scheme, (color, label) in STYLES.items():
        mine = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row["nodes"])
        nodes = [row["nodes"] for row in mine]
        simulated = [100 * row["simulated"] for row in mine]
        reach = [100 * row["simulated_ci"] for row in mine]
        axes.errorbar(nodes, simulated, yerr=reach, color=color, marker="o", markersize=3, label=label)
        axes.plot(nodes, [100 * row["formula"] for row in mine], color=color, linestyle=":")
        cut = [place for place, row in enumerate(mine) if row["finished_share"] < 1]
        axes.plot([nodes[n] for n in cut], [simulated[n] for n in cut], "x", color=color, markersize=9)
    axes.plot([], [], ":", color="gray", label="the same by formula")
    axes.plot([], [], "x", color="gray", markersize=9, label=CUT_NAME)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("nodes")
    axes.set_ylabel("overhead, share of the useful time")
    axes.grid(alpha=0.3)


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Draw simulated over formula, against what is to be far shorter than the time between failures."""
    lines = (
        ("interval", "full", "", "tab:red", "-", "longer save interval: full recovery's overhead"),
        ("interval", "partial", "_pls", "tab:purple", "-", "longer save interval: partial recovery's PLS"),
        ("duration", "full", "", "tab:red", "--", "slower saves and recoveries: full recovery"),
        ("duration", "partial", "", "tab:blue", "--", "slower saves and recoveries: partial recovery"),
    )
    for part, recovery, what, color, line, label in lines:
        mine = [row for row in rows if row["part"] == part]
        ratios = [row[recovery][f"simulated{what}"] / row[recovery][f"formula{what}"] for row in mine]
        axes.plot(
            [row["ratio"] for row in mine], ratios, line, color=color, marker="o", markersize=3, label=label
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("the interval, or a save or recovery, over the mean time between failures")
    axes.set_ylabel("simulated / by formula (1: the formula is right)")
    axes.set_title(
        "Formulas fail where intervals or saves are long against the time between failures", fontsize=9
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_ways(axes: Any, rows: Sequence[Row]) -> None:
    """Draw simulated over formula for ways to fail."""
    bars = (
        ("full", "simulated", "formula", "tab:red", "full recovery's overhead"),
        ("partial", "simulated", "formula", "tab:blue", "partial recovery's overhead"),
        ("partial", "simulated_pls", "formula_pls", "tab:purple", "partial recovery's PLS"),
    )
    for number, (recovery, over, under, color, label) in enumerate(bars):
        places = [place + 0.25 * (number - 1) for place in range(len(rows))]
        heights = [row[recovery][over] / row[recovery][under] for row in rows]
        reach = [row[recovery][f"{over}_ci"] / row[recovery][under] for row in rows]
        axes.barh(places, heights, 0.22, xerr=reach, color=color, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [WAYS[row["way"]] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("simulated / by formula (1: the formula is right)")
    axes.set_title("How failures come: the formulas expect them one by one, at random", fontsize=9)
    axes.legend(fontsize=8, loc="center right")
