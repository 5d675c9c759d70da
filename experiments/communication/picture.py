"""The pictures of `experiments.communication`: steps by links, and trainings by time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.communication.contenders import BASELINE, CONTENDERS
from experiments.communication.figures import Cell, Training, ending_of
from experiments.emulation.figures import TEN_THOUSANDTHS, Estimate
from experiments.splitting.figures import link_name

SLOWEST_SHOWN: Final = 0.25
"""Colours end where a contender is this many times as fast as the baseline, and at its inverse."""


def draw_steps(cells: Sequence[Cell], path: Path) -> None:
    """Throughput over the baseline of every contender, a panel for each model and layout.

    Args:
        cells: that were timed.
        path: of the picture.
    """
    panels: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        panels.setdefault((cell.model, str(cell.layout)), []).append(cell)
    models, layouts = (list(dict.fromkeys(key[place] for key in panels)) for place in (0, 1))
    shape = len(models), len(layouts)
    figure = Figure(figsize=(5.2 * shape[1], 4.6 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for row, model in enumerate(models):
        for column, layout in enumerate(layouts):
            axes = grid[row][column]
            if (model, layout) in panels:
                _draw_panel(axes, panels[model, layout])
                axes.set_title(f"{model}, {layout}", fontsize=10)
            else:
                axes.set_axis_off()
    figure.suptitle(
        "Throughput over DDP's; what leaves a node in a step\nframed: auto's choice; bold: best comparable",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Axes, cells: Sequence[Cell]) -> None:
    by_speed = sorted(cells, key=lambda cell: cell.gbit_per_s or np.inf)
    shown = [name for name in CONTENDERS if any(name in cell.rounds[0] for cell in cells)]
    table = np.array([[cell.speedups().get(name, np.nan) for cell in by_speed] for name in shown])
    limit = float(np.log(1 / SLOWEST_SHOWN))
    axes.imshow(np.log(table), cmap="RdYlGn", vmin=-limit, vmax=limit, aspect="auto")
    for column, cell in enumerate(by_speed):
        for row, name in enumerate(shown):
            weight = "bold" if name == cell.best else "normal"
            box = {"boxstyle": "square,pad=0.15", "fill": False} if name == cell.chosen else None
            text = f"{table[row, column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, fontweight=weight, bbox=box)
    axes.set_xticks(range(len(by_speed)), [link_name(cell.gbit_per_s) for cell in by_speed], fontsize=7)
    axes.set_yticks(range(len(shown)), [_with_bytes(name, by_speed) for name in shown], fontsize=7)


def _with_bytes(name: str, cells: Sequence[Cell]) -> str:
    """A contender, and what leaves the busiest node in a step with it; any link has the same bytes."""
    sent = next(cell.link_bytes[name] for cell in cells if name in cell.link_bytes)
    return f"{name}, {sent / 1e3:,.1f} kB"


def draw_trainings(
    trainings: Sequence[Training], figures: Mapping[str, float | None], title: str, path: Path
) -> None:
    """AUC by time of the first seed, and the difference at the end over seeds.

    Args:
        trainings: of all contenders and seeds.
        figures: of the result.
        title: what was trained, and where.
        path: of the picture.
    """
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    names = list(dict.fromkeys(each.contender for each in trainings))
    for number, name in enumerate(names):
        curves = [each.curve for each in trainings if each.contender == name]
        seconds, aucs = (
            [mean(point[value] for point in points) for points in zip(*curves, strict=True)]
            for value in ("seconds", "auc")
        )
        style = {"color": "black", "linewidth": 2.0} if name == BASELINE else {"color": f"C{number % 10}"}
        left.plot(seconds, aucs, "-o", markersize=3, label=name, **style)
    left.set(xlabel="seconds of training, mean over seeds", ylabel="AUC on the test day", title=title)
    left.legend(fontsize=7)
    _draw_deltas(right, [name for name in names if name != BASELINE], figures)
    figure.savefig(path, dpi=130)


def _draw_deltas(axes: Axes, names: Sequence[str], figures: Mapping[str, float | None]) -> None:
    found = []
    for name in names:
        value, ci = (figures[f"auc_delta_{ending_of(name)}{end}"] for end in ("", "_ci"))
        assert value is not None
        assert ci is not None
        found.append(Estimate(value, ci))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.errorbar(
        [each.value * TEN_THOUSANDTHS for each in found],
        range(len(names)),
        xerr=[each.ci * TEN_THOUSANDTHS for each in found],
        fmt="s",
        capsize=4,
    )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="AUC after equal samples - DDP's, in 1e-4", title="95 % intervals over seeds")
