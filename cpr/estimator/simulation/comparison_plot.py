"""Picture of `cpr simulate --plot`: overhead by part, and the distribution over runs."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cpr.estimator.simulation.comparison import NAMES, RecoveryComparison
from cpr.estimator.simulation.comparison_text import PART_NAMES
from cpr.estimator.simulation.simulation import PARTS
from cpr.humanize import duration_text

COLORS = {"full": "tab:orange", "partial": "tab:blue", "mirror": "tab:green"}


def draw(comparison: RecoveryComparison, path: Path) -> None:
    """Draw all recoveries into a file, whose ending tells the format.

    Raises:
        ValueError: the format is not known.
    """
    sides = comparison.sides
    figure = Figure(figsize=(10, 4), layout="constrained")
    bars, runs = figure.subplots(1, 2)
    names, bottom = [], np.zeros(2 * len(sides))
    for name, side in sides.items():
        interval = duration_text(side.simulation.config.interval_s)
        names += [f"{name},\nby formula", f"{name},\nsimulated\n(save every {interval})"]
    for number, part in enumerate(PARTS):
        heights = [
            100 * value
            for side in sides.values()
            for value in (getattr(side.expected, part), side.simulation.parts[part].value)
        ]
        bars.bar(range(len(bottom)), heights, bottom=bottom, color=f"C{number}", label=PART_NAMES[part])
        bottom += heights
    means = [side.simulation.overhead for side in sides.values()]
    bars.errorbar(
        range(1, len(bottom), 2),
        [100 * mean.value for mean in means],
        yerr=[100 * mean.half_width for mean in means],
        fmt="none",
        ecolor="black",
        capsize=4,
        label="95 % interval",
    )
    bars.set_xticks(range(len(bottom)), names, fontsize=8)
    bars.set_ylabel("overhead, % of the useful time")
    bars.legend(fontsize=8)
    for name, side in sides.items():
        overheads = np.sort(100 * side.simulation.overheads)
        reached = 100 * np.arange(1, len(overheads) + 1) / len(overheads)
        runs.step(overheads, reached, where="post", color=COLORS[name], label=NAMES[name])
        runs.axvline(
            100 * side.expected.total, color=COLORS[name], linestyle=":", label=f"{NAMES[name]}, by formula"
        )
    runs.set_xlabel("overhead, % of the useful time")
    runs.set_ylabel("% of the runs that cost this or less")
    runs.legend(fontsize=8)
    figure.savefig(path, dpi=150)
