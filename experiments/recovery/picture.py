"""The picture of `experiments.recovery`: from `kill -9` to the first new step, by phase."""

from pathlib import Path
from statistics import median_low
from typing import Final

from matplotlib.figure import Figure

from experiments.harness.record import Row
from experiments.recovery.timeline import EVENTS

LABELS: Final = {
    "started": "kill noticed, new processes started",
    "imported": "imports",
    "met": "process group",
    "built": "model built",
    "restored": "values restored",
    "stepped": "first step",
}
NAMES: Final = {"rival": "torchrun,\nfull reload with DCP", "ours": "CPR,\npartial recovery"}


def draw(result: Row, folder: Path) -> None:
    """Draw one bar for each contender and number of workers: the phases of its median round.

    A round of its own, not the medians of phases, so that the pieces add up to the printed total.
    """
    sizes = sorted({row["world_size"] for row in result["rows"]})
    bars = [(size, name) for size in sizes for name in NAMES]
    figure = Figure(figsize=(9, 1.6 + 0.75 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (size, name) in enumerate(bars):
        rounds = [row["phases"][name] for row in result["rows"] if row["world_size"] == size]
        totals = [sum(each.values()) for each in rounds]
        total = median_low(totals)
        shown, left = rounds[totals.index(total)], 0.0
        for number, event in enumerate(EVENTS):
            label = LABELS[event] if place == 0 else None
            axes.barh(place, shown[event], 0.5, left=left, color=f"C{number}", label=label)
            left += shown[event]
        axes.plot(
            totals, [place - 0.36] * len(totals), "k|", label="each round's total" if place == 0 else None
        )
        axes.annotate(f"{total:.1f} s", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [f"{size} workers: {NAMES[name]}" for size, name in bars])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from kill -9 of one worker to the next step of all (bars: the median round)")
    figure.suptitle("How fast training continues after a worker is killed", fontsize=11)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(folder / "recovery.png", dpi=110)
