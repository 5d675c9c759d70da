"""Pictures of what a restart takes, by phase."""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Final

from matplotlib.axes import Axes

from experiments.recovery.timeline import EVENTS

LABELS: Final = {
    "started": "kill noticed, new processes started",
    "imported": "imports",
    "met": "process group",
    "built": "model built",
    "restored": "values restored",
    "stepped": "first step",
}


def phase_bars(axes: Axes, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Draw a bar for each label: the phases of its median round, and a mark for each round's total.

    A round of its own, not the medians of phases, so that the pieces add up to the printed total.

    Args:
        axes: empty.
        rounds: seconds by event, of each round, by label from top to bottom.
    """
    for place, of_label in enumerate(rounds.values()):
        totals = [sum(each.values()) for each in of_label]
        total = median_low(totals)
        shown, left = of_label[totals.index(total)], 0.0
        for number, event in enumerate(EVENTS):
            label = LABELS[event] if place == 0 else None
            axes.barh(place, shown[event], 0.5, left=left, color=f"C{number}", label=label)
            left += shown[event]
        axes.plot(
            totals, [place - 0.36] * len(totals), "k|", label="each round's total" if place == 0 else None
        )
        axes.annotate(f"{total:.1f} s", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rounds)), list(rounds))
    axes.invert_yaxis()
