"""Draws the pictures of `experiments.communication`: throughput of steps, and trainings by time."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.communication.contenders import BASELINE, CHOSEN, LIMIT, is_comparable
from experiments.communication.figures import (
    TRAINED_GBIT_PER_S,
    TRAINED_LAYOUT,
    Cell,
    TrainingCurve,
    cells_of,
    ending_of,
    trainings_of,
)
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate
from experiments.splitting.figures import link_name

TICKS: Final = (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7)
LABELS: Final = {
    "ddp": "DDP, fp32 all-reduce (PyTorch)",
    "auto": "auto: measures exchanges and keeps the fastest",
    "ddp_fp16": "DDP, fp16 (PyTorch)",
    "power_sgd": "DDP, PowerSGD of rank 2 (PyTorch)",
    "ring_int8": "ring all-reduce, int8",
    "all_gather_0.01": "1 % of the values, all-gather",
    "star_0.01": "1 % of the values, same for all ranks",
    "gravac": "GraVAC: share by gradient norm",
    "gravac_geometric": "GraVAC, geometric steps",
    "pareto": "share by Pareto rule",
    "selsync": "SelSync: skips some exchanges",
}
"""Descriptions of the contenders of trainings."""


def draw(result: Row, folder: Path) -> None:
    """Draw the throughput in every cell, and the trainings if there are any."""
    draw_steps(cells_of(result["rows"]), folder / "communication.png")
    trainings = trainings_of(result["rows"])
    draw_trainings(trainings, result["figures"], folder / "communication_training.png")


def draw_steps(cells: Sequence[Cell], path: Path) -> None:
    """Draw the throughput of every contender over DDP's, with a line for each cell."""
    cells = sorted(cells, key=lambda cell: (cell.model, str(cell.layout), cell.gbit_per_s or inf))
    collectives = {contender: collective for collective, contender in CHOSEN.items()}
    figure = Figure(figsize=(10, 1.6 + 0.26 * len(cells)), layout="constrained")
    axes = figure.subplots()
    comparable: list[tuple[float, int]] = []
    lossier: list[tuple[float, int]] = []
    limits, chosen = [], []
    for place, cell in enumerate(cells):
        speedups = cell.speedups()
        for name in speedups.keys() - {LIMIT, BASELINE}:
            (comparable if is_comparable(name) else lossier).append((speedups[name], place))
        limits.append((speedups[LIMIT], place))
        chosen.append((speedups[cell.chosen], place))
        at = (1.01, place)
        axes.annotate(
            collectives[cell.chosen], at, xycoords=("axes fraction", "data"), va="center", fontsize=7
        )
    for points, marker, size, colour, label in (
        (comparable, ".", 6, "tab:gray", "exchange of all values, or of at least 1 %"),
        (lossier, "x", 4, "tab:gray", "smaller share or low rank, which `auto` never chooses"),
        (limits, "|", 10, "black", "no exchange: the most that is possible"),
        (chosen, "D", 6, "tab:blue", "choice of `auto`, named on the right"),
    ):
        speeds, places = np.array(points).reshape(-1, 2).T
        axes.plot(speeds, places, marker, markersize=size, color=colour, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells], fontsize=7)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.grid(axis="y", alpha=0.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("throughput over DDP's fp32 all-reduce (logarithmic)")
    axes.set_title(
        "Training steps with different exchanges of dense gradients, by model (dense parts of the recipes;\n"
        "wide: terabyte with 52 million dense parameters), workers and link speed",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_trainings(
    trainings: Sequence[TrainingCurve], figures: Mapping[str, float | None], path: Path
) -> None:
    """Draw AUC by time, mean over seeds, next to the difference at the end."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    trained = {each.contender for each in trainings}
    names = [name for name in LABELS if name in trained]
    for number, name in enumerate(names):
        curves = [each.curve for each in trainings if each.contender == name]
        seconds, aucs = (
            [mean(point[value] for point in points) for points in zip(*curves, strict=True)]
            for value in ("seconds", "auc")
        )
        colour = "black" if name == BASELINE else f"C{(number - 1) % 10}"
        wide = 2.5 if name in {BASELINE, "auto"} else 1.2
        left.plot(seconds, aucs, "-o", markersize=3, color=colour, linewidth=wide, label=LABELS[name])
        if name != BASELINE:
            _draw_delta(right, number, colour, figures, name)
    left.set(xlabel="seconds of training, mean over seeds", ylabel="AUC on the test day")
    left.set_title(
        f"Training the recipe tiny: {TRAINED_LAYOUT}, {link_name(TRAINED_GBIT_PER_S)}", fontsize=10
    )
    left.legend(fontsize=7, loc="lower right")
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(1, len(names)), [LABELS[name] for name in names[1:]], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("AUC minus DDP's after equally many samples, in 1e-4")
    right.set_title("Difference at the end: mean and 95 % interval over seeds", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_delta(axes: Axes, place: int, colour: str, figures: Mapping[str, float | None], name: str) -> None:
    value, ci = (figures[f"auc_delta_{ending_of(name)}{end}"] for end in ("", "_ci"))
    assert value is not None
    assert ci is not None
    found = Estimate(value * TEN_THOUSANDTHS, ci * TEN_THOUSANDTHS)
    axes.errorbar([found.value], [place], xerr=[found.half_width], fmt="s", capsize=4, color=colour)
