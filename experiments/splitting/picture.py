"""Draws the picture of `experiments.splitting`: bytes saved and throughput gained, by model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.harness.record import Row
from experiments.splitting.figures import PlanCell, cells_of, link_name

BASELINES: Final = {
    "": "parameter server, 214 ids per sample (multi-hot)",
    "_one_hot": "parameter server, 26 ids per sample (one-hot)",
    "_a2a": "all-to-all of embeddings (TorchRec), without ids",
}
MODELS: Final = {
    "lr": "logistic\nregression",
    "fm": "FM",
    "deepfm": "DeepFM",
    "dlrm": "DLRM",
    "dcn": "DCN-v2",
}
TICKS: Final = (0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3)


def draw(result: Row, folder: Path) -> None:
    """Draw bytes saved above throughput over TorchRec's plan for each number of workers."""
    cells = cells_of(result["rows"])
    workers = sorted({cell.workers for cell in cells})
    figure = Figure(figsize=(11, 8.4), layout="constrained")
    grid = figure.add_gridspec(2, len(workers), height_ratios=[1, 1.25])
    _draw_bytes(figure.add_subplot(grid[0, :]), result["figures"])
    panels = [figure.add_subplot(grid[1, column]) for column in range(len(workers))]
    for axes in panels[1:]:
        axes.sharey(panels[0])
    for axes, number in zip(panels, workers, strict=True):
        _draw_speed(axes, [cell for cell in cells if cell.workers == number])
        axes.set_title(
            f"Throughput of operator splitting over TorchRec's plan, {number} workers", fontsize=10
        )
    panels[0].set_ylabel("ratio of throughputs (bars: 95 % interval)")
    panels[-1].legend(fontsize=8, title="filled: `auto` chose to split", title_fontsize=8)
    figure.savefig(folder / "splitting.png", dpi=150)


def _draw_bytes(axes: Axes, figures: Mapping[str, float]) -> None:
    for place, (ending, label) in enumerate(BASELINES.items()):
        shares = [100 * figures[f"bytes_saved_{model}{ending}"] for model in MODELS]
        places = [number + 0.27 * (place - 1) for number in range(len(MODELS))]
        bars = axes.bar(places, shares, 0.27, label=f"against {label}")
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(MODELS)), list(MODELS.values()))
    axes.margins(y=0.1)
    axes.set_ylabel("% of the baseline's bytes")
    axes.set_title(
        "Bytes per step saved by operator splitting with `auto`, 4 workers (below 0: more bytes sent)",
        fontsize=10,
    )
    axes.legend(fontsize=8)


def _draw_speed(axes: Axes, cells: Sequence[PlanCell]) -> None:
    links = list(dict.fromkeys(cell.gbit_per_s for cell in cells))
    for number, (model, label) in enumerate(MODELS.items()):
        colour = f"C{number}"
        of_model = [cell for cell in cells if cell.model == model]
        ratios = [cell.ratio("des", "torchrec") for cell in of_model]
        places = [links.index(cell.gbit_per_s) + 0.06 * (number - 2) for cell in of_model]
        axes.plot(places, [ratio.value for ratio in ratios], color=colour, label=label.replace("\n", " "))
        for place, ratio, cell in zip(places, ratios, of_model, strict=True):
            axes.plot([place, place], [ratio.low, ratio.high], color=colour, linewidth=3, alpha=0.4)
            filled = colour if "split" in cell.chosen.values() else "white"
            axes.plot(place, ratio.value, "o", color=colour, markerfacecolor=filled)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(links)), [f"link {link_name(link)}" for link in links], fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", alpha=0.3)
