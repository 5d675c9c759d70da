"""The picture of `experiments.recovery`: from `kill -9` to the first new step, by phase."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.figure import Figure

from experiments.harness.record import Row
from experiments.recovery.timeline import EVENTS

LABELS: Final = {
    "started": "noticed, new processes run",
    "imported": "imports",
    "met": "process group",
    "built": "model built",
    "restored": "values back",
    "stepped": "first step",
}
NAMES: Final = {"rival": "torchrun + full DCP reload", "ours": "partial recovery"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw one bar for each contender and world size, its pieces the medians of the phases.

    Args:
        rows: of the result.
        path: of the picture.
    """
    rounds = [row for row in rows if "phases" in row]
    sizes = sorted({row["world_size"] for row in rounds}, reverse=True)
    bars = [(size, name) for size in sizes for name in reversed(NAMES)][::-1]
    figure = Figure(figsize=(9, 1.2 + 0.7 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (size, name) in enumerate(reversed(bars)):
        mine = [row["phases"][name] for row in rounds if row["world_size"] == size]
        left = 0.0
        for number, event in enumerate(EVENTS):
            width = median(each[event] for each in mine)
            label = LABELS[event] if place == 0 else None
            axes.barh(place, width, left=left, color=f"C{number}", label=label)
            left += width
        totals = [sum(each.values()) for each in mine]
        axes.plot(totals, [place] * len(totals), "k.", markersize=4)
        axes.annotate(
            f"{median(totals):.1f} s",
            (max(*totals, left), place),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(bars)), [f"{size} workers: {NAMES[name]}" for size, name in reversed(bars)])
    axes.set_xlabel("seconds from kill -9 to the first new step of all workers (medians; dots: rounds)")
    axes.set_xlim(right=1.1 * axes.get_xlim()[1])
    axes.legend(
        fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.4, 1.0 + 0.6 / len(bars)), frameon=False
    )
    figure.savefig(path, dpi=150)
