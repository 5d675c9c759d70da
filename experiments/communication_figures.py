"""Figures of `experiments.communication` from its rows; what each means is said there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from typing import Final

from experiments.communication_contenders import BASELINE, CONTENDERS, LIMIT, Rival, is_comparable
from experiments.communication_winners import table_vi_hits
from experiments.emulation_figures import Estimate
from experiments.record import Row
from experiments.splitting_figures import Ratio, link_name

WIDE: Final = "wide"
WIDE_GBIT_PER_S: Final = 1.0
TARGET_SHARE: Final = 0.75
"""Of the samples: the AUC that the baseline has by then is the target."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers in nodes."""

    workers: int
    per_node: int = 1

    def __str__(self) -> str:
        return f"{self.workers} workers" + (f" in nodes of {self.per_node}" if self.per_node > 1 else "")

    @property
    def ending(self) -> str:
        """Of figures."""
        return f"{self.workers}_workers" + (f"_nodes_of_{self.per_node}" if self.per_node > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Contenders that took turns on one model, layout and speed of links."""

    model: str
    layout: Layout
    gbit_per_s: float | None
    """Of a node's link; None: not limited."""
    rounds: Sequence[Mapping[str, float]]
    """Seconds of a step by contender; not all are in every round."""
    link_bytes: Mapping[str, float]
    """That left the busiest node in a step."""
    chosen: str
    """Contender that `auto` chose."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, {self.layout}, {link_name(self.gbit_per_s)}"

    def ratio(self, one: str, other: str) -> Ratio:
        """Throughput of `one` contender over that of the `other`, in the rounds that have both."""
        return Ratio.of(_ratios(self.rounds, one, other))

    def speedups(self) -> dict[str, float]:
        """Throughput of each contender over the baseline's."""
        return _speedups(self.rounds)

    @property
    def best(self) -> str:
        """Of the comparable contenders, by every other round."""
        comparable = {
            name: value for name, value in _speedups(self.rounds[::2]).items() if is_comparable(name)
        }
        return max(comparable, key=comparable.__getitem__)

    @property
    def auto_ratio(self) -> Ratio:
        """`auto` over the best comparable contender; exactly 1 where it is that one.

        Of the rounds that had no say in who is the best: in those that had, it was lucky, too.
        """
        return Ratio.of(_ratios(self.rounds[1::2], self.chosen, self.best))

    @property
    def share(self) -> Ratio:
        """What is gained at most: the share of a step of the baseline that goes if nothing is exchanged."""
        gone = self.ratio(LIMIT, BASELINE)
        return Ratio(value=1 - 1 / gone.value, low=1 - 1 / gone.low, high=1 - 1 / gone.high)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to the end."""

    contender: str
    seed: int
    curve: Sequence[Mapping[str, float]]
    """`samples`, `seconds` so far and `auc`, by time."""

    @property
    def auc(self) -> float:
        """At the end."""
        return self.curve[-1]["auc"]

    def seconds_to(self, auc: float) -> float:
        """Until that AUC was reached, on a line between two evaluations; infinite: it was not."""
        points = [(0.0, 0.5), *((each["seconds"], each["auc"]) for each in self.curve)]
        for (begin_s, below), (end_s, reached) in pairwise(points):
            if reached >= auc:
                share = (auc - below) / (reached - below) if reached > below else 0.0
                return begin_s + max(0.0, share) * (end_s - begin_s)
        return inf


def _ratios(rounds: Sequence[Mapping[str, float]], one: str, other: str) -> list[float]:
    return [each[other] / each[one] for each in rounds if {one, other} <= each.keys()]


def _speedups(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: median(_ratios(rounds, name, BASELINE)) for name in names}


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """All contests."""
    return [
        Cell(
            model=row["model"],
            layout=Layout(workers=row["workers"], per_node=row["per_node"]),
            gbit_per_s=row["gbit_per_s"],
            rounds=row["rounds"],
            link_bytes=row["link_bytes"],
            chosen=row["chosen"],
        )
        for row in rows
        if "chosen" in row
    ]


def trainings_of(rows: Sequence[Row]) -> list[Training]:
    """All trainings."""
    return [
        Training(contender=row["contender"], seed=row["seed"], curve=row["curve"])
        for row in rows
        if "curve" in row
    ]


def figures_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """All figures."""
    cells = cells_of(rows)
    figures: dict[str, float | None] = {}
    figures |= share_figures(rows)
    figures |= step_figures(cells)
    figures |= training_figures(trainings_of(rows))
    return figures | {"table_vi_hits": table_vi_hits()}


def share_figures(rows: Sequence[Row]) -> dict[str, float]:
    """The dense exchange's share of a step of whole models."""
    figures: dict[str, float] = {}
    for row in rows:
        if "share_of" in row:
            layout = Layout(workers=row["workers"])
            name = f"dense_share_{row['share_of']}_{layout.ending}_{_link_ending(row['gbit_per_s'])}"
            figures |= _ranged(name, share_of(row))
    return figures


def share_of(row: Row) -> Ratio:
    """What a step of a whole model gets shorter by if nothing but scalars is exchanged."""
    return Ratio.of([1 - each[LIMIT] / each["dense"] for each in row["rounds"]])


def step_figures(cells: Sequence[Cell]) -> dict[str, float]:
    """How good `auto` is, and what it is worth on the wide model."""
    figures: dict[str, float] = _ranged("auto_worst_ratio", worst_cell(cells).auto_ratio)
    figures["auto_best_share"] = sum(cell.chosen == cell.best for cell in cells) / len(cells)
    figures["auto_dense_share"] = sum(_is_dense(cell.chosen) for cell in cells) / len(cells)
    wide = wide_cells(cells)
    if wide:
        worst = min(wide, key=lambda cell: cell.ratio(cell.chosen, BASELINE).value)
        figures |= _ranged("wide_1gbps_speedup", worst.ratio(worst.chosen, BASELINE))
    for cell in wide:
        figures |= _ranged(f"wide_1gbps_speedup_{cell.layout.ending}", cell.ratio(cell.chosen, BASELINE))
        figures |= _ranged(f"dense_share_wide_{cell.layout.ending}_1gbps", cell.share)
    return figures


def training_figures(trainings: Sequence[Training]) -> dict[str, float | None]:
    """AUC after equal samples, and time to a target, each against the baseline of the same seed."""
    by_name = _by_contender(trainings)
    baseline = by_name.get(BASELINE, {})
    figures: dict[str, float | None] = {}
    for name, of_seeds in by_name.items():
        if name != BASELINE:
            deltas = [each.auc - baseline[seed].auc for seed, each in of_seeds.items()]
            figures |= Estimate.of(deltas).figures(f"auc_delta_{name}")
            ratios = [time_ratio(baseline[seed], each) for seed, each in of_seeds.items()]
            reached = min(ratios) > 0
            figures |= (
                Estimate.of(ratios).figures(f"time_to_auc_speedup_{name}")
                if reached
                else {f"time_to_auc_speedup_{name}": None}
            )
    return figures


def time_ratio(baseline: Training, other: Training) -> float:
    """How much sooner `other` reaches what the baseline reaches with 3 of 4 samples; 0: never."""
    samples = TARGET_SHARE * baseline.curve[-1]["samples"]
    target = next(each["auc"] for each in baseline.curve if each["samples"] >= samples)
    return baseline.seconds_to(target) / other.seconds_to(target)


def worst_cell(cells: Sequence[Cell]) -> Cell:
    """Where `auto` falls behind the best contender most."""
    return min(cells, key=lambda cell: cell.auto_ratio.value)


def wide_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Those of the wide model on slow links."""
    return [cell for cell in cells if (cell.model, cell.gbit_per_s) == (WIDE, WIDE_GBIT_PER_S)]


def notes_of(cells: Sequence[Cell], figures: Mapping[str, float | None]) -> dict[str, str]:
    """Which cells the extremes are, where `auto` was not the best, and what never reached a target."""
    worst = worst_cell(cells)
    behind = "; ".join(
        f"{cell.name}: {cell.chosen} where {cell.best} was best" for cell in cells if cell.auto_ratio.high < 1
    )
    notes = {
        "auto_worst_ratio": f"{worst.name}: it chose {worst.chosen}, and {worst.best} was best",
        "auto_best_share": f"clearly not the best: {behind or 'nowhere'}",
    }
    for name, value in figures.items():
        if value is None:
            notes[name] = "not all seeds reached the target with the same samples"
    return notes


def _is_dense(name: str) -> bool:
    contender = CONTENDERS[name]
    return not isinstance(contender, Rival) and not contender.is_sparse


def _by_contender(trainings: Iterable[Training]) -> dict[str, dict[int, Training]]:
    found: dict[str, dict[int, Training]] = {}
    for each in trainings:
        found.setdefault(each.contender, {})[each.seed] = each
    return found


def _ranged(name: str, ratio: Ratio) -> dict[str, float]:
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def _link_ending(gbit_per_s: float | None) -> str:
    return "unthrottled" if gbit_per_s is None else f"{gbit_per_s:g}gbps"
