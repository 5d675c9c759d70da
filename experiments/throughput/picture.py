"""Draws the picture of `experiments.throughput`: samples/s of every setting, and the parts of a step."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.plotting import median_bars
from experiments.harness.record import Row

TRAINERS = {"ours": "this trainer,", "torchrec": "TorchRec,"}


def draw(result: Row, folder: Path) -> None:
    """Draw samples/s of every setting above the parts of a step of each side's best setting."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1.2])
    _draw_rates(upper, result["rows"])
    profiles = [row for row in result["rows"] if "breakdown_ms" in row]
    _draw_profiles(lower, {row["key"].removeprefix("profile "): row["breakdown_ms"] for row in profiles})
    figure.savefig(folder / "throughput.png", dpi=150)


def label_of(setting: str) -> str:
    """Name of a setting for readers who have not seen the experiment."""
    trainer, precision, layout, *extras = setting.split(" ", maxsplit=3)
    texts = [f"({extra.replace('pipelined keeps', 'pipelined, keeps')})" for extra in extras]
    return " ".join([TRAINERS[trainer], precision, layout, *texts])


def _draw_rates(axes: Axes, rows: Sequence[Row]) -> None:
    measured: dict[str, list[float]] = {}
    for row in rows:
        if "setting" in row:
            measured.setdefault(label_of(row["setting"]), []).append(row["samples_per_s"] / 1e3)
    names = sorted(measured, key=lambda name: median(measured[name]), reverse=True)
    median_bars(
        axes,
        {name: measured[name] for name in names},
        highlighted=[name for name in names if name.startswith(TRAINERS["ours"])],
        hatched=[name for name in names if "keeps memory" in name],
    )
    axes.set_xlabel("thousand samples/s (bar: median; dots: rounds)")
    axes.set_title(
        "Training speed by precision and processes x threads\n"
        "(keeps memory: TorchRec with this trainer's memory settings; pipelined: TrainPipelineSparseDist)",
        fontsize=10,
    )


def _draw_profiles(axes: Axes, profiles: dict[str, dict[str, float]]) -> None:
    names = list(profiles)[::-1]
    left = [0.0] * len(names)
    for kind in profiles[names[0]]:
        values = [profiles[name][kind] for name in names]
        axes.barh([label_of(name) for name in names], values, left=left, label=kind)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.0f} ms", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set_xlabel("ms per step in the first process, under PyTorch's profiler")
    axes.set_title("Parts of a step in the best setting of each side", fontsize=10)
    axes.set_xlim(right=1.1 * max(left))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.32), ncols=4, fontsize=8, frameon=False)
