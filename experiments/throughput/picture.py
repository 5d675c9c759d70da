"""The picture of `experiments.throughput`: samples/s of every setting, and where the time of a step goes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.record import Row

COLOURS = {"ours": "tab:blue", "torchrec": "tab:gray"}


def draw(rows: Sequence[Row], rates: Sequence[dict[str, float]], path: Path) -> None:
    """Draw both panels.

    Args:
        rows: of the result; those with a breakdown are drawn on the right.
        rates: samples/s by setting, for each round.
        path: of the picture.
    """
    profiles = {
        row["key"].removeprefix("profile "): row["breakdown_ms"] for row in rows if "breakdown_ms" in row
    }
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1.2])
    _draw_rates(upper, rates)
    _draw_profiles(lower, profiles)
    figure.savefig(path, dpi=150)


def _draw_rates(axes: Axes, rates: Sequence[dict[str, float]]) -> None:
    measured: dict[str, list[float]] = {}
    for rate in rates:
        for name, value in rate.items():
            measured.setdefault(name, []).append(value / 1e3)
    names = sorted(measured, key=lambda name: median(measured[name]))
    for place, name in enumerate(names):
        values = measured[name]
        colour = COLOURS[name.split()[0]]
        hatch = "///" if "keeps memory" in name else None
        axes.barh(place, median(values), color=colour, alpha=0.6, hatch=hatch)
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.annotate(
            f"{median(values):.1f}", (max(values), place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("thousand samples/s (bar: median; dots: rounds)")
    axes.set_title("Training speed: precision, processes x threads", fontsize=10)
    axes.set_xlim(right=1.1 * max(map(max, measured.values())))


def _draw_profiles(axes: Axes, profiles: dict[str, dict[str, float]]) -> None:
    names = list(profiles)[::-1]
    left = [0.0] * len(names)
    for kind in profiles[names[0]]:
        values = [profiles[name][kind] for name in names]
        axes.barh(names, values, left=left, label=kind)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.0f} ms", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set_xlabel("ms a step in the first process, under the profiler")
    axes.set_title("Where the time goes", fontsize=10)
    axes.set_xlim(right=1.1 * max(left))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.32), ncols=4, fontsize=8, frameon=False)
