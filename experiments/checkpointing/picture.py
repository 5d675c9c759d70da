"""The picture of `experiments.checkpointing`: what each way to save costs, how fast it writes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.record import Row

OURS, THEIRS = "tab:blue", "tab:gray"
LABELS: Final = {
    "torch.save": "torch.save per rank",
    "dcp save": "DCP save",
    "dcp async": "DCP async_save",
    "ours waiting": "ours, waited for",
    "ours consistent": "ours, consistent",
    "ours rolling": "ours, rolling",
    "ours rows": "ours, 1/8 of the rows",
    "raw": "plain writing",
}
COSTS: Final = ("torch.save", "dcp save", "dcp async", "ours consistent", "ours rolling", "ours rows")
RATES: Final = ("torch.save", "dcp save", "ours waiting", "raw")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw both panels.

    Args:
        rows: of the result; the rounds are drawn.
        path: of the picture.
    """
    rounds = [row for row in rows if "round" in row]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_costs(upper, rounds)
    _draw_rates(lower, rounds)
    figure.savefig(path, dpi=150)


def _values(rounds: Sequence[Row], name: str, value: str) -> list[float]:
    return [row["savers"][name][value] for row in rounds]


def _colour(name: str) -> str:
    return OURS if name.startswith("ours") else THEIRS


def _draw_costs(axes: Axes, rounds: Sequence[Row]) -> None:
    """Time to the commit as an outline, in it the time lost, in that the time waited."""
    for place, name in enumerate(reversed(COSTS)):
        waited, lost, whole = (
            median(_values(rounds, name, value)) for value in ("blocked_s", "lost_s", "committed_s")
        )
        axes.barh(place, whole, fill=False, edgecolor=_colour(name), linewidth=0.8)
        axes.barh(place, lost, color=_colour(name), alpha=0.4)
        axes.barh(place, waited, color=_colour(name))
        values = _values(rounds, name, "lost_s")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        text = f"waits {waited:.2f} s, loses {lost:.2f} s"
        axes.annotate(
            text, (max(whole, *values), place), (5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(COSTS)), [LABELS[name] for name in reversed(COSTS)])
    axes.set_xlabel(
        "seconds (full: training waits; pale: training time lost; outline: until the commit; dots: rounds)"
    )
    axes.set_title("What a save costs training: 2 workers, 2.6 GB, medians", fontsize=10)
    axes.set_xlim(left=0, right=1.35 * axes.get_xlim()[1])


def _draw_rates(axes: Axes, rounds: Sequence[Row]) -> None:
    measured = {
        f"save: {LABELS[name]}": (
            _colour(name),
            [row["savers"][name]["bytes"] / row["savers"][name]["committed_s"] / 1e9 for row in rounds],
        )
        for name in RATES
    }
    for name, label in (("dcp", "DCP"), ("ours", "ours")):
        num_bytes = [row["savers"]["dcp save"]["bytes"] for row in rounds]
        values = [
            size / row["loads"][f"{name} cold"] / 1e9 for size, row in zip(num_bytes, rounds, strict=True)
        ]
        measured[f"load: {label}, cold files"] = (_colour(name), values)
    for place, (colour, values) in enumerate(reversed(measured.values())):
        axes.barh(place, median(values), color=colour, alpha=0.6)
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.annotate(
            f"{median(values):.2f}", (max(values), place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(measured)), list(reversed(measured)))
    axes.set_xlabel("GB/s, both workers together, training stands still (bar: median; dots: rounds)")
    axes.set_xlim(left=0, right=1.12 * axes.get_xlim()[1])
