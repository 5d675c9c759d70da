"""The picture of `experiments.renting`."""

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from experiments.harness.record import Row
from experiments.renting.figures import LINKS, measured_offer, rounds_of, rows_of
from experiments.renting.quality import reached, target_of
from experiments.renting.times import Grid


def draw(result: Row, folder: Path) -> None:
    """Draw predictions over what was measured, and measured time over money."""
    grid = Grid.from_json(result["config"]["grid"])
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    times, noise, offers = figure.subplots(1, 3)
    _draw_times(times, grid, result["rows"])
    _draw_noise(noise, result["rows"])
    _draw_offers(offers, grid, result["rows"])
    figure.suptitle("How many workers to rent: predictions from few runs, and what was measured", fontsize=11)
    figure.savefig(folder / "renting.png", dpi=110)


def _diagonal(axes: Any, values: list[float], unit: str) -> None:
    reach = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(reach, reach, color="k", linewidth=0.8, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _draw_times(axes: Any, grid: Grid, rows: list[Row]) -> None:
    everything = []
    for number, link in enumerate(LINKS):
        pairs = [
            (one.step_s(link, *cell), one.model(link).seconds(*cell))
            for one in rounds_of(rows, grid)
            for cell in grid.held_out
        ]
        label = "links not limited" if link == "free" else f"links of {grid.gbit_per_s:g} Gb/s"
        axes.plot(*zip(*pairs, strict=True), "o", color=f"C{number}", markersize=4, alpha=0.6, label=label)
        everything += [each[0] for each in pairs]
    _diagonal(axes, everything, "seconds of a step")
    axes.set_title("steps that were not fitted to", fontsize=9)


def _draw_noise(axes: Any, rows: list[Row]) -> None:
    linear = [row for row in rows_of(rows, "linear") if row["found"]]
    for name in dict.fromkeys(row["case"] for row in linear):
        pairs = [(row["exact"], row["found"]) for row in linear if row["case"] == name]
        axes.plot(*zip(*pairs, strict=True), "o", markersize=4, alpha=0.6, label=name)
    _diagonal(axes, [row["exact"] for row in linear], "noise scale")
    axes.set(xlabel="noise scale in closed form", ylabel="noise scale from norms")
    axes.set_title("linear regression", fontsize=9)


def _draw_offers(axes: Any, grid: Grid, rows: list[Row]) -> None:
    """Measured time over money of the first round with throttled links."""
    curves = rows_of(rows, "curve")
    found = reached(curves, target_of(curves))
    exact = {
        batch: mean(samples for cell, samples in found.items() if cell[0] == batch and samples is not None)
        for batch in grid.batches
        if any(samples is not None for cell, samples in found.items() if cell[0] == batch)
    }
    one = rounds_of(rows, grid)[0]
    for workers in grid.workers:
        offers = [measured_offer(one, "throttled", workers, batch, exact) for batch in exact]
        axes.plot(
            [3600 * each.money for each in offers],
            [3600 * each.hours for each in offers],
            "o-",
            markersize=4,
            label=f"{workers} worker{'s'[: workers > 1]}",
        )
    axes.set(xscale="log", yscale="log", xlabel="worker-seconds", ylabel="seconds")
    axes.set_title(f"to the target, by batch, links of {grid.gbit_per_s:g} Gb/s", fontsize=9)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
