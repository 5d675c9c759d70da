"""The picture of `experiments.splitting`: bytes saved by each model, and what splitting does to its speed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.splitting.figures import Cell, link_name
from experiments.splitting.workload import MODELS

BASELINES: Final = {
    "": "parameter server, multi-hot",
    "_one_hot": "parameter server, one-hot",
    "_a2a": "all-to-all of embeddings",
}
LEAST_SHOWN: Final = -1.0
"""Saved share where the axis ends; what costs more than that is cut off."""


def draw(figures: Mapping[str, float], cells: Sequence[Cell], path: Path) -> None:
    """Draw all panels.

    Args:
        figures: of the result.
        cells: that were timed.
        path: of the picture.
    """
    workers = sorted({cell.workers for cell in cells})
    figure = Figure(figsize=(5 + 4 * len(workers), 4.2), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(workers))
    _draw_bytes(left, figures)
    for axes, number in zip(others, workers, strict=True):
        _draw_speed(axes, [cell for cell in cells if cell.workers == number])
        axes.set(title=f"{number} workers (filled: what auto chose is split)")
    figure.savefig(path, dpi=150)


def _draw_bytes(axes: Axes, figures: Mapping[str, float]) -> None:
    for place, (ending, label) in enumerate(BASELINES.items()):
        shares = [100 * max(LEAST_SHOWN, figures[f"bytes_saved_{model}{ending}"]) for model in MODELS]
        axes.bar([number + 0.27 * (place - 1) for number in range(len(MODELS))], shares, 0.27, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(MODELS)), list(MODELS))
    axes.set(title="bytes saved, 4 workers", ylabel="% of the baseline's")
    axes.legend(fontsize="small")


def _draw_speed(axes: Axes, cells: Sequence[Cell]) -> None:
    links = list(dict.fromkeys(cell.gbit_per_s for cell in cells))
    for number, model in enumerate(MODELS):
        colour = f"C{number}"
        of_model = [cell for cell in cells if cell.model == model]
        ratios = [cell.ratio("des", "torchrec") for cell in of_model]
        places = [links.index(cell.gbit_per_s) + 0.06 * (number - 2) for cell in of_model]
        axes.plot(places, [ratio.value for ratio in ratios], color=colour, label=model)
        for place, ratio, cell in zip(places, ratios, of_model, strict=True):
            axes.plot([place, place], [ratio.low, ratio.high], color=colour, linewidth=3, alpha=0.4)
            filled = colour if "split" in cell.chosen.values() else "white"
            axes.plot(place, ratio.value, "o", color=colour, markerfacecolor=filled)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(links)), [link_name(link) for link in links])
    axes.set(ylabel="throughput, split over TorchRec's plan", yscale="log")
    axes.legend(fontsize="small")
