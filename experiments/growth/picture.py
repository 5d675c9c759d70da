"""The picture of `experiments.growth`."""

from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.growth.figures import axes_of, curve
from experiments.harness.record import Row

SHOWN: Final = {
    "start": "first start",
    "step": "step",
    "save": "save, to its commit",
    "kill": "kill -9 to the next step",
    "node": "lost node to the next step",
    "next_batch": "opening the data half way",
}
STYLES: Final = {"ours": "-", "rival": "--"}


def draw(result: Row, folder: Path) -> None:
    """Draw a panel for each axis: seconds by contender."""
    rows = result["rows"]
    axes = axes_of(rows)
    figure = Figure(figsize=(11, 2.6 * -(-len(axes) // 3) + 0.8), layout="constrained")
    panels = list(figure.subplots(-(-len(axes) // 3), 3, squeeze=False).flat)
    shown: dict[str, Line2D] = {}
    for panel, axis in zip(panels[: len(axes)], axes, strict=True):
        for number, (metric, label) in enumerate(SHOWN.items()):
            for contender, style in STYLES.items():
                points = curve(rows, axis, contender, metric)
                if len(points) > 1:
                    (line,) = panel.loglog(
                        list(points), list(points.values()), style, marker=".", color=f"C{number}"
                    )
                    if contender == "ours":
                        shown.setdefault(label, line)
        panel.set_xlabel(axis)
        panel.set_ylabel("seconds")
    for panel in panels[len(axes) :]:
        panel.set_visible(False)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("What grows: CPR (solid), torchrun and DCP (dashed)", fontsize=11)
    figure.savefig(folder / "growth.png", dpi=110)
