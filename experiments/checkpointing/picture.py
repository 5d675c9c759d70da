"""Draws the picture of `experiments.checkpointing`: costs of a save, and speed of saves and loads."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.plotting import median_bars
from experiments.harness.record import Row

COSTS: Final = {
    "torch.save": "torch.save per rank",
    "dcp save": "PyTorch DCP save",
    "dcp async": "PyTorch DCP async_save",
    "ours consistent": "CPR, consistent\n(copies all rows at once)",
    "ours rolling": "CPR, rolling\n(copies over many steps)",
    "ours rows": "CPR, 1/8 of the rows",
}
RATES: Final = {
    "torch.save": "save: torch.save per rank",
    "dcp save": "save: PyTorch DCP",
    "ours waiting": "save: CPR",
    "raw": "plain write and fsync",
}


def draw(result: Row, folder: Path) -> None:
    """Draw both panels."""
    rounds = [row for row in result["rows"] if "round" in row]
    figure = Figure(figsize=(10, 6.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_costs(upper, rounds)
    _draw_rates(lower, rounds)
    figure.savefig(folder / "checkpointing.png", dpi=150)


def _values(rounds: Sequence[Row], name: str, value: str) -> list[float]:
    return [row["savers"][name][value] for row in rounds]


def _draw_costs(axes: Axes, rounds: Sequence[Row]) -> None:
    """Draw the time to the commit as an outline, and in it the time lost and the time waited."""
    for place, name in enumerate(COSTS):
        colour = "tab:blue" if name.startswith("ours") else "tab:gray"
        waited, lost, whole = (
            median(_values(rounds, name, value)) for value in ("blocked_s", "lost_s", "committed_s")
        )
        axes.barh(place, whole, fill=False, edgecolor=colour, linewidth=0.8)
        axes.barh(place, lost, color=colour, alpha=0.4)
        axes.barh(place, waited, color=colour)
        values = _values(rounds, name, "lost_s")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        text = f"waits {waited:.2f} s, loses {lost:.2f} s"
        at = (max(whole, *values), place)
        axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(COSTS)), list(COSTS.values()))
    axes.invert_yaxis()
    axes.set_xlabel(
        "seconds (full: training waits; pale: training time lost, waits and slower steps together;\n"
        "outline: until the save is committed; dots: training time lost in each round)"
    )
    axes.set_title("Cost of one save for training: 2 workers, 2.6 GB, medians over rounds", fontsize=10)
    axes.set_xlim(left=0, right=1.35 * axes.get_xlim()[1])


def _draw_rates(axes: Axes, rounds: Sequence[Row]) -> None:
    measured = {
        label: [row["savers"][name]["bytes"] / row["savers"][name]["committed_s"] / 1e9 for row in rounds]
        for name, label in RATES.items()
    }
    for name, label in (("dcp", "load: PyTorch DCP"), ("ours", "load: CPR")):
        measured[label] = [
            row["savers"]["dcp save"]["bytes"] / row["loads"][f"{name} cold"] / 1e9 for row in rounds
        ]
    median_bars(axes, measured, highlighted=["save: CPR", "load: CPR"], digits=2)
    axes.set_xlabel("GB/s of both workers together, without training meanwhile (bar: median; dots: rounds)")
    axes.set_title("Speed of full saves, and of loads from files outside the page cache", fontsize=10)
