"""Figures of `experiments.splitting` from its rows; what each means is said there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from experiments.harness.record import Row
from experiments.splitting.errors import WIRE_DTYPES
from experiments.splitting.traffic import ids_of, rows_of, saved

MAIN_WORKERS: Final = 4
"""Of the figures without a number of workers: the most whose bytes are counted."""
RESAMPLES: Final = 2000
TIE: Final = 0.05
"""How far from 1 the interval of a tie may reach; a wider one leaves open what is faster."""
BAG_ENDINGS: Final = {"multi_hot": "", "one_hot": "_one_hot"}
ERROR_ENDINGS: Final = {"gradients": "", "logits": "_logits"}
PLANS: Final = ("torchrec", "des")
WORDS: Final = {frozenset({"exchange"}): "torchrec", frozenset({"split"}): "des"}
"""Strategies of all heads, and the contender that has the same."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Of two throughputs: the median over rounds of the ratio within a round, and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Self:
        """Of the ratios within rounds: bootstrap over rounds."""
        measured = np.array(ratios)
        drawn = np.random.default_rng(0).choice(measured, (RESAMPLES, len(measured)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return cls(value=float(np.median(measured)), low=float(low), high=float(high))

    @property
    def reach(self) -> float:
        """How far from the ratio its interval reaches, as a share of it."""
        return max(self.high / self.value - 1, 1 - self.low / self.value)

    @property
    def is_firm(self) -> bool:
        """Whether the whole interval is on one side."""
        return not self.low <= 1 <= self.high

    @property
    def is_tie(self) -> bool:
        """Whether the difference is smaller than its interval, which is small."""
        return not self.is_firm and 1 - self.low <= TIE and self.high - 1 <= TIE

    @property
    def is_hit(self) -> bool:
        """Whether the first was right, or as good as the other."""
        return self.is_tie or self.low > 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on so many workers behind links of one speed."""

    model: str
    workers: int
    gbit_per_s: float | None
    """Of a link; None: not limited."""
    rounds: Sequence[Mapping[str, float]]
    """Seconds a step of each contender."""
    chosen: Mapping[str, Any]
    """By `auto`: the strategy of each head."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, {self.workers} workers, {link_name(self.gbit_per_s)}"

    @property
    def plan(self) -> str | None:
        """The contender with the strategies that `auto` chose; None: neither has them all."""
        return plan_with(self.chosen)

    def ratio(self, one: str, other: str) -> Ratio:
        """Throughput of `one` contender over that of the `other`."""
        return Ratio.of([each[other] / each[one] for each in self.rounds])

    @property
    def better(self) -> str:
        """Of the two plans."""
        return "des" if self.ratio("des", "torchrec").value >= 1 else "torchrec"

    @property
    def auto_ratio(self) -> Ratio:
        """`auto` over the better plan; exactly 1 where it is that plan."""
        return self.ratio(self.plan or "auto", self.better)

    @property
    def choice_ratio(self) -> Ratio:
        """What `auto` chose over what it could have chosen; a mixture of both over the better plan."""
        if self.plan is None:
            return self.auto_ratio
        (other,) = {*PLANS} - {self.plan}
        return self.ratio(self.plan, other)


def plan_with(strategies: Mapping[str, Any]) -> str | None:
    """The contender in which all heads have these strategies; None: neither."""
    return WORDS.get(frozenset(strategies.values()))


def strategies_in(chosen: Mapping[str, Any]) -> dict[str, str]:
    """By path of the head, from what a run folder says."""
    return {path: head["strategy"] for path, head in chosen["heads"].items()}


def link_name(gbit_per_s: float | None) -> str:
    """For people."""
    return "unthrottled" if gbit_per_s is None else f"{gbit_per_s:g} Gb/s"


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """All that were timed."""
    return [
        Cell(
            model=row["model"],
            workers=row["workers"],
            gbit_per_s=row["gbit_per_s"],
            rounds=row["rounds"],
            chosen=strategies_in(row["chosen"]),
        )
        for row in rows
        if "rounds" in row
    ]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    return byte_figures(rows) | error_figures(rows) | time_figures(cells_of(rows))


def byte_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of bytes saved, by model and number of workers."""
    figures, ids = {}, ids_of(rows)
    for (model, workers), row in rows_of(rows).items():
        ending = "" if workers == MAIN_WORKERS else f"_{workers}_workers"
        for bags, of_bags in BAG_ENDINGS.items():
            pulled, sent = row["pull_and_push"][bags], ids[model, workers][bags]
            figures[f"bytes_saved_{model}{of_bags}{ending}"] = saved(row, pulled)
            figures[f"bytes_saved_{model}_with_ids{of_bags}{ending}"] = saved(row, pulled, sent)
        figures[f"bytes_saved_{model}_a2a{ending}"] = saved(row, row["all_to_all"])
    return figures


def error_figures(rows: Sequence[Row]) -> dict[str, float]:
    """What rounding partial results on their way does to a step, by wire dtype, in the worst model."""
    measured = errors_of(rows).values()
    return {
        f"wire_error_{dtype}{ending}": max(errors[dtype][kind] for errors in measured)
        for dtype in WIRE_DTYPES
        for kind, ending in ERROR_ENDINGS.items()
    }


def errors_of(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors by wire dtype, of each kind, by model."""
    return {row["model"]: row["wire_errors"] for row in rows if "wire_errors" in row}


def time_figures(cells: Sequence[Cell]) -> dict[str, float]:
    """How good the planner's choices are, and what they are worth."""
    choices = [cell.choice_ratio for cell in cells]
    worst, best = worst_cell(cells).auto_ratio, best_cell(cells).ratio("des", "torchrec")
    return {
        "planner_hits_share": sum(each.is_hit for each in choices) / len(cells),
        "planner_firm_hits_share": sum(each.low > 1 for each in choices) / len(cells),
        "ties_share": sum(each.is_tie for each in choices) / len(cells),
        "open_share": sum(not (each.is_firm or each.is_tie) for each in choices) / len(cells),
        "auto_worst_ratio": worst.value,
        "auto_worst_ratio_low": worst.low,
        "auto_worst_ratio_high": worst.high,
        "best_throughput_ratio": best.value,
        "best_throughput_ratio_low": best.low,
        "best_throughput_ratio_high": best.high,
    }


def worst_cell(cells: Sequence[Cell]) -> Cell:
    """Where `auto` falls behind the better plan most."""
    return min(cells, key=lambda cell: cell.auto_ratio.value)


def best_cell(cells: Sequence[Cell]) -> Cell:
    """Where splitting gains most."""
    return max(cells, key=lambda cell: cell.ratio("des", "torchrec").value)


def notes_of(rows: Sequence[Row]) -> dict[str, str]:
    """Which models and cells the extremes are, where the planner was wrong, and what was timed before."""
    errors = errors_of(rows)
    worst = {
        f"wire_error_{dtype}": max(errors, key=lambda model: errors[model][dtype]["gradients"])
        for dtype in WIRE_DTYPES
    }
    commits = sorted({row["commit"] for row in rows if "rounds" in row and "commit" in row})
    kept = {"times": f"cells were timed at commit {', '.join(commits)}"} if commits else {}
    return worst | _notes_on(cells_of(rows)) | kept


def _notes_on(cells: Sequence[Cell]) -> dict[str, str]:
    ratios = {cell.name: cell.choice_ratio for cell in cells}
    wrong = "; ".join(name for name, ratio in ratios.items() if ratio.high < 1)
    unsure = "; ".join(name for name, ratio in ratios.items() if not (ratio.is_firm or ratio.is_tie))
    return {
        "auto_worst_ratio": worst_cell(cells).name,
        "best_throughput_ratio": best_cell(cells).name,
        "planner_hits_share": f"wrong: {wrong or 'nowhere'}. Left open: {unsure or 'nowhere'}",
    }
