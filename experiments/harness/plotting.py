"""Panels that the pictures of several experiments share."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Final

from matplotlib.axes import Axes

TEN_THOUSANDTHS: Final = 1e4
"""Unit in which pictures show differences of AUC."""


def median_bars(
    axes: Axes,
    values: Mapping[str, Sequence[float]],
    *,
    highlighted: Collection[str],
    hatched: Collection[str] = (),
    digits: int = 1,
) -> None:
    """Draw a horizontal bar up to the median of each label's rounds, with a dot for each round.

    Args:
        axes: empty.
        values: of the rounds by label, from top to bottom.
        highlighted: labels in blue, those of this project; others are grey.
        hatched: labels of bars with a hatch.
        digits: after the point, in the label of a bar.
    """
    for place, (label, rounds) in enumerate(values.items()):
        colour = "tab:blue" if label in highlighted else "tab:gray"
        hatch = "///" if label in hatched else None
        axes.barh(place, median(rounds), color=colour, alpha=0.6, hatch=hatch)
        axes.plot(rounds, [place] * len(rounds), "k.", markersize=4)
        text, at = f"{median(rounds):,.{digits}f}", (max(rounds), place)
        axes.annotate(text, at, (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=1.14 * max(map(max, values.values())))
