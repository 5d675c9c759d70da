"""Draws the picture of `experiments.pipeline`: speed over `none`, what a step waits for, and AUC."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Row
from experiments.pipeline.exchanges import KINDS
from experiments.pipeline.figures import Cell, cells_of, computing_s, contenders, speedup
from experiments.pipeline.quality import deltas
from experiments.pipeline.schedules import NONE

LABELS: Final = {
    "ids": "ids alone (exact)",
    "prefetch": "prefetch (exact)",
    "waves": "waves (exact but for rounding)",
    "tick_tock": "waves (tick-tock)",
    "delayed": "delayed (rows and dense gradients)",
    "delayed_dense": "delayed (dense gradients alone)",
}
COLOURS: Final = dict(zip((*KINDS, "computation"), ("C3", "C1", "C4", "C5", "C7"), strict=True))


def draw(result: Row, folder: Path) -> None:
    """Draw speed above the parts of a step, a column for each shape and number of workers, and AUC below."""
    cells = cells_of(result["rows"])
    layouts = list(dict.fromkeys((cell.shape, cell.workers) for cell in cells))
    figure = Figure(figsize=(2 + 1.6 * len(layouts), 10), layout="constrained")
    grid = figure.add_gridspec(3, len(layouts), height_ratios=[1.2, 1, 0.8])
    speeds = [figure.add_subplot(grid[0, column]) for column in range(len(layouts))]
    parts = [figure.add_subplot(grid[1, column]) for column in range(len(layouts))]
    for panels in (speeds, parts):
        for axes in panels[1:]:
            axes.sharey(panels[0])
    for place, layout in enumerate(layouts):
        rows = {cell: row for cell, row in cells.items() if (cell.shape, cell.workers) == layout}
        _draw_speed(speeds[place], rows)
        _draw_parts(parts[place], rows)
        speeds[place].set_title(f"{layout[0]},\n{layout[1]} workers", fontsize=10)
    speeds[0].set_ylabel("throughput over `none`\n(bars: 95 % interval)")
    parts[0].set_ylabel("% of a step under `none`")
    # the colours of a column with all contenders
    figure.legend(*speeds[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    _draw_auc(figure.add_subplot(grid[2, :]), deltas(result["rows"]))
    figure.savefig(folder / "pipeline.png", dpi=110)


def _draw_speed(axes: Axes, rows: Mapping[Cell, Row]) -> None:
    allowed = contenders(next(iter(rows.values())))
    for number, (schedule, label) in enumerate(LABELS.items()):
        if schedule not in allowed:
            continue
        ratios = [speedup(row, schedule) for row in rows.values()]
        places = [place + 0.08 * (number - 2) for place in range(len(ratios))]
        values = [ratio.value for ratio in ratios]
        reach = [[each.value - each.low for each in ratios], [each.high - each.value for each in ratios]]
        axes.errorbar(
            places, values, yerr=reach, fmt="o", markersize=4, capsize=2, label=label, color=f"C{number}"
        )
    axes.axhline(1, color="black", linewidth=0.8)
    _name_links(axes, rows)
    axes.grid(axis="y", alpha=0.3)


def _draw_parts(axes: Axes, rows: Mapping[Cell, Row]) -> None:
    bottoms = [0.0] * len(rows)
    for part, colour in COLOURS.items():
        shares = [_share(row, part) for row in rows.values()]
        axes.bar(range(len(rows)), shares, 0.6, bottom=bottoms, color=colour, alpha=0.7, label=part)
        bottoms = [below + share for below, share in zip(bottoms, shares, strict=True)]
    _name_links(axes, rows)


def _share(row: Row, part: str) -> float:
    """Percent of a step under `none`, in the median of the rounds."""
    shares = (
        (each[NONE][f"{part}_s"] if part in KINDS else computing_s(each)) / each[NONE]["step_s"]
        for each in row["rounds"]
    )
    return 100.0 * float(median(shares))


def _name_links(axes: Axes, rows: Mapping[Cell, Row]) -> None:
    names = ["∞" if cell.gbit_per_s is None else f"{cell.gbit_per_s:g}" for cell in rows]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("Gb/s", fontsize=8)


def _draw_auc(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    for place, of_seeds in enumerate(found.values()):
        axes.plot([place] * len(of_seeds), [TEN_THOUSANDTHS * each for each in of_seeds], "o", alpha=0.6)
    axes.set_xticks(range(len(found)), [name.replace("_", "\n") for name in found], fontsize=8)
    axes.set_ylabel("AUC minus that of `none`,\nin 1e-4, by seed")
