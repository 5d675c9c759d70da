"""Computes the figures of `experiments.pipeline.run`, which that module describes, from its rows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Final

from experiments.harness.record import Row
from experiments.harness.statistics import Ratio, median_figures
from experiments.pipeline.exchanges import BACKWARD, FORWARD, IDS, KINDS, formula_s
from experiments.pipeline.quality import auc_figures
from experiments.pipeline.schedules import EXACT, NONE
from experiments.splitting.figures import link_name

HIDDEN: Final = {"prefetch": (IDS, FORWARD), "waves": (IDS, FORWARD, BACKWARD)}
"""Exchanges that a schedule can run under computation."""
LEAST_SHARE: Final = 0.05
"""Share of a step that must be hideable, since noise over next to nothing is no figure."""

Round = Mapping[str, Mapping[str, float]]
"""What a step took, by schedule; see `experiments.pipeline.worker`."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A shape on so many workers with links of a speed."""

    shape: str
    workers: int
    gbit_per_s: float | None
    """Speed of a link; None: not limited."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.workers} workers, {link_name(self.gbit_per_s)}"

    def figure(self, name: str) -> str:
        """Name of a figure of this cell."""
        shape = "" if self.shape == "terabyte" else f"_{self.shape}"
        workers = "" if self.workers == 2 else f"_{self.workers}_workers"
        link = "unthrottled" if self.gbit_per_s is None else f"{self.gbit_per_s:g}gbps"
        return f"{name}{shape}{workers}_{link}"


def cells_of(rows: Sequence[Row]) -> dict[Cell, Row]:
    """The rows of timed cells."""
    names = [field.name for field in fields(Cell)]
    return {Cell(**{name: row[name] for name in names}): row for row in rows if "rounds" in row}


def contenders(row: Row) -> list[str]:
    """All schedules of a cell but `none`."""
    return sorted({*row["rounds"][0]} - {NONE})


def of_rounds(row: Row, value: Callable[[Round], float]) -> Ratio:
    """Median over the rounds of a cell, with its interval."""
    return Ratio.of([value(each) for each in row["rounds"]])


def speedup(row: Row, schedule: str) -> Ratio:
    """Throughput of a schedule over that of `none`."""
    return of_rounds(row, lambda each: each[NONE]["step_s"] / each[schedule]["step_s"])


def exchanging_s(each: Round, kinds: Collection[str]) -> float:
    """Seconds of a step under `none` in exchanges of these kinds."""
    return sum(each[NONE][f"{kind}_s"] for kind in kinds)


def computing_s(each: Round) -> float:
    """Seconds of a step under `none` outside of exchanges."""
    return each[NONE]["step_s"] - exchanging_s(each, KINDS)


def hideable_s(each: Round, schedule: str) -> float:
    """Seconds of a step under `none` that a schedule could hide at most."""
    return min(exchanging_s(each, HIDDEN[schedule]), computing_s(each))


def hideable_share(row: Row, schedule: str) -> Ratio:
    """Share of a step under `none` that a schedule could hide at most."""
    return of_rounds(row, lambda each: hideable_s(each, schedule) / each[NONE]["step_s"])


def hidden_share(row: Row, schedule: str) -> Ratio:
    """Seconds that a schedule saves of a step, over those that it could hide at most."""
    return of_rounds(
        row,
        lambda each: (each[NONE]["step_s"] - each[schedule]["step_s"]) / hideable_s(each, schedule),
    )


def exchange_share(row: Row, kind: str) -> Ratio:
    """Share of a step under `none` in exchanges of a kind."""
    return of_rounds(row, lambda each: exchanging_s(each, [kind]) / each[NONE]["step_s"])


def figures_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, str]]:
    """All figures and notes on them."""
    cells = cells_of(rows)
    figures: dict[str, float] = {}
    for cell, row in cells.items():
        figures |= dict(_of_cell(cell, row))
    over_cells, notes = _over_cells(cells)
    peaks = {f"peak_bytes_{row['schedule']}": row["peak_bytes"] for row in rows if "peak_bytes" in row}
    return figures | over_cells | peaks | auc_figures(rows), notes


def _of_cell(cell: Cell, row: Row) -> Iterator[tuple[str, float]]:
    ratios = {"step_s": of_rounds(row, lambda each: each[NONE]["step_s"])}
    ratios |= {f"{kind}_share": exchange_share(row, kind) for kind in KINDS}
    ratios["hideable_share"] = hideable_share(row, "prefetch")
    for schedule in contenders(row):
        ratios[f"{schedule}_speedup"] = speedup(row, schedule)
        if _can_hide(row, schedule):
            ratios[f"{schedule}_hidden_share"] = hidden_share(row, schedule)
        for figure, value in (("cpu", "cpu_s"), ("bytes", "sent_bytes")):
            of_steps = [each[schedule][value] / each[NONE][value] for each in row["rounds"]]
            yield cell.figure(f"{schedule}_{figure}_ratio"), median(of_steps)
    for name, ratio in ratios.items():
        yield from ratio.figures(cell.figure(name)).items()
    yield cell.figure("hideable_formula_share"), hideable_formula_share(cell, row)


def hideable_formula_share(cell: Cell, row: Row) -> float:
    """Hideable time of exact prefetching by formula, over a step under `none`."""
    seconds = sum(
        formula_s(row["bytes"][kind], row["calls"][kind], cell.gbit_per_s, row["latency_s"])
        for kind in HIDDEN["prefetch"]
    )
    computing = median(computing_s(each) for each in row["rounds"])
    step_s: float = median(each[NONE]["step_s"] for each in row["rounds"])
    return min(seconds, computing) / step_s


def auto_ratio(row: Row) -> Ratio:
    """Throughput of what `auto` chose over the fastest exact schedule, which other rounds select."""
    rounds = row["rounds"]
    ratios = []
    for selecting, compared in ((rounds[::2], rounds[1::2]), (rounds[1::2], rounds[::2])):
        exact = [name for name in EXACT if name in rounds[0]]
        best = min(exact, key=lambda name: median(each[name]["step_s"] for each in selecting))
        ratios += [each[best]["step_s"] / each[row["chosen"]]["step_s"] for each in compared]
    return Ratio.of(ratios)


def _over_cells(cells: Mapping[Cell, Row]) -> tuple[dict[str, float], dict[str, str]]:
    """Medians and extremes over cells, and the least ratios with intervals; notes name their cells."""
    chosen = [row["chosen"] for row in cells.values()]
    figures = {f"auto_{name}_share": chosen.count(name) / len(chosen) for name in ("ids", "prefetch")}
    worst = {"auto_worst_ratio": {cell: auto_ratio(row) for cell, row in cells.items()}}
    for name in dict.fromkeys(name for row in cells.values() for name in contenders(row)):
        of_name = {cell: row for cell, row in cells.items() if name in contenders(row)}
        worst[f"{name}_worst_ratio"] = speeds = {cell: speedup(row, name) for cell, row in of_name.items()}
        figures |= median_figures(f"{name}_speedup", [each.value for each in speeds.values()])
        hidden = [hidden_share(row, name).value for row in of_name.values() if _can_hide(row, name)]
        if hidden:
            figures |= median_figures(f"{name}_hidden_share", hidden)
    notes = {}
    for figure, ratios in worst.items():
        cell = min(ratios, key=lambda each: ratios[each].value)
        figures |= ratios[cell].figures(figure)
        notes[figure] = str(cell)
    return figures, notes


def _can_hide(row: Row, schedule: str) -> bool:
    return schedule in HIDDEN and hideable_share(row, schedule).value >= LEAST_SHARE
