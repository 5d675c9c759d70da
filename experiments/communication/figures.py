"""Computes the figures of `experiments.communication`, which that module describes, from its rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from typing import Final

from experiments.communication.contenders import AUTO_NAME, BASELINE, LIMIT, is_comparable, is_lossless
from experiments.communication.winners import table_vi_hits
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate, Ratio
from experiments.harness.turns import Rounds, ratios
from experiments.splitting.figures import link_name

WIDE: Final = "wide"
WIDE_GBIT_PER_S: Final = 1.0
TARGET_SHARE: Final = 0.75
"""Share of the samples after which the AUC of the baseline is the target."""
SMALL_SHARE: Final = 0.03
"""Share of a baseline step below which `auto` should send all values in fp32, as little can be gained."""
LEAST_SAMPLES: Final = 4
"""Minimum of rounds for the interval of a ratio."""


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Number of workers, in all and per node."""

    workers: int
    per_node: int = 1

    def __str__(self) -> str:
        return f"{self.workers} workers" + (f" in nodes of {self.per_node}" if self.per_node > 1 else "")

    @property
    def ending(self) -> str:
        """Part of the figures' names."""
        return f"{self.workers}_workers" + (f"_nodes_of_{self.per_node}" if self.per_node > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Timed rounds of one model, node layout and link speed."""

    model: str
    layout: NodeLayout
    gbit_per_s: float | None
    """Speed of a node's link; None: not limited."""
    rounds: Rounds
    link_bytes: Mapping[str, float]
    """Bytes that left the busiest node in a step, by contender."""
    chosen: str
    """Contender with the exchange that `auto` chose."""

    @property
    def name(self) -> str:
        """Name for readers."""
        return f"{self.model}, {self.layout}, {link_name(self.gbit_per_s)}"

    def ratio(self, one: str, other: str) -> Ratio:
        """Throughput of `one` contender over that of the `other`, in the rounds that have both."""
        return _interval(ratios(self.rounds, one, other))

    def speedups(self) -> dict[str, float]:
        """Throughput of each contender over the baseline's."""
        names = dict.fromkeys(name for each in self.rounds for name in each)
        return {name: median(ratios(self.rounds, name, BASELINE)) for name in names}

    @property
    def best(self) -> str:
        """The fastest comparable contender."""
        return self._fastest(self.rounds, _to_the_end(self.rounds, is_comparable))

    @property
    def best_of_all(self) -> str:
        """The fastest contender with an exchange, comparable or not."""
        return self._fastest(self._shared, _to_the_end(self._shared, _exchanges))

    @property
    def auto_ratio(self) -> Ratio:
        """Throughput of `auto` over the best comparable contender; exactly 1 if `auto` chose that one."""
        return self._ratio_to_best(self.rounds, is_comparable)

    @property
    def whole_table_ratio(self) -> Ratio:
        """Throughput of `auto` over the best contender with an exchange."""
        return self._ratio_to_best(self._shared, _exchanges)

    @property
    def _shared(self) -> Rounds:
        """Rounds of all contenders, before only comparable ones continue."""
        return [each for each in self.rounds if LIMIT in each]

    def _ratio_to_best(self, rounds: Rounds, among: Callable[[str], bool]) -> Ratio:
        """Compare each half of the rounds with the best contender of the other half.

        A contender that won a half by luck is thus not compared in the same half.
        """
        names, halves = _to_the_end(rounds, among), (rounds[::2], rounds[1::2])
        pooled: list[float] = []
        for judging, compared in (halves, halves[::-1]):
            pooled += ratios(compared, self.chosen, self._fastest(judging, names))
        return _interval(pooled)

    def _fastest(self, rounds: Rounds, names: Sequence[str]) -> str:
        """The fastest of the named contenders in these rounds."""
        return max(names, key=lambda name: median(ratios(rounds, name, self.chosen)))

    @property
    def share(self) -> Ratio:
        """Share of a baseline step that ends without an exchange: the most that can be gained."""
        return _share(self.ratio(LIMIT, BASELINE))


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """A whole training by one contender."""

    contender: str
    seed: int
    curve: Sequence[Mapping[str, float]]
    """`samples`, `seconds` so far and `auc` of each evaluation."""
    decisions: Sequence[tuple[int, str]] = ()
    """Steps at which `auto` chose a collective, with its name."""

    @property
    def auc(self) -> float:
        """AUC at the end."""
        return self.curve[-1]["auc"]

    def seconds_to(self, auc: float) -> float:
        """Time until that AUC, interpolated between evaluations; infinite if it was not reached."""
        points = [(0.0, 0.5), *((each["seconds"], each["auc"]) for each in self.curve)]
        for (begin_s, below), (end_s, reached) in pairwise(points):
            if reached >= auc:
                share = (auc - below) / (reached - below) if reached > below else 0.0
                return begin_s + max(0.0, share) * (end_s - begin_s)
        return inf


def ending_of(contender: str) -> str:
    """Ending of a contender's figures: without points, which format strings cannot contain."""
    return contender.replace(".", "_")


def _to_the_end(rounds: Rounds, among: Callable[[str], bool]) -> list[str]:
    """Contenders that are in the last round."""
    return [*filter(among, rounds[-1])]


def _exchanges(name: str) -> bool:
    return name != LIMIT


def _interval(measured: Sequence[float]) -> Ratio:
    """Ratio of the rounds with its interval.

    Raises:
        ValueError: there are too few rounds for an interval.
    """
    if len(measured) < LEAST_SAMPLES:
        raise ValueError(
            f"a ratio of {len(measured)} rounds has no interval: measure {LEAST_SAMPLES} or more"
        )
    return Ratio.of(measured)


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """All timed cells."""
    return [
        Cell(
            model=row["model"],
            layout=NodeLayout(workers=row["workers"], per_node=row["per_node"]),
            gbit_per_s=row["gbit_per_s"],
            rounds=row["rounds"],
            link_bytes=row["link_bytes"],
            chosen=row["chosen"],
        )
        for row in rows
        if "chosen" in row
    ]


def trainings_of(rows: Sequence[Row]) -> list[TrainingCurve]:
    """All trainings."""
    return [
        TrainingCurve(
            contender=row["contender"],
            seed=row["seed"],
            curve=row["curve"],
            decisions=[(step, name) for step, name in row.get("decisions", [])],
        )
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
            layout = NodeLayout(workers=row["workers"])
            name = f"dense_share_{row['share_of']}_{layout.ending}_{_link_ending(row['gbit_per_s'])}"
            figures |= share_of(row).figures(name)
    return figures


def share_of(row: Row) -> Ratio:
    """Share of a whole model's step that ends if only scalars are exchanged."""
    return _share(_interval(ratios(row["rounds"], LIMIT, "dense")))


def step_figures(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Quality of `auto`, and its gain on the wide model."""
    worst, worst_of_all = worst_cell(cells), worst_cell_of_all(cells)
    figures: dict[str, float | None] = {
        **worst.auto_ratio.figures("auto_worst_ratio"),
        **worst_of_all.whole_table_ratio.figures("auto_worst_ratio_whole_table"),
        "auto_best_share": sum(cell.auto_ratio.high >= 1 for cell in cells) / len(cells),
        "auto_lossless_share": _lossless_share(cells),
        "auto_lossless_share_where_small": _lossless_share(small_cells(cells)),
    }
    wide = wide_cells(cells)
    if wide:
        slowest = min(wide, key=lambda cell: cell.ratio(cell.chosen, BASELINE).value)
        figures |= slowest.ratio(slowest.chosen, BASELINE).figures("wide_1gbps_speedup")
        figures |= byte_figures(wide[0])
    for cell in wide:
        figures |= cell.ratio(cell.chosen, BASELINE).figures(f"wide_1gbps_speedup_{cell.layout.ending}")
        figures |= cell.share.figures(f"dense_share_wide_{cell.layout.ending}_1gbps")
    return figures


def byte_figures(cell: Cell) -> dict[str, float]:
    """Bytes of each contender that leave the busiest node in a step, over the baseline's."""
    sent = cell.link_bytes
    return {
        f"bytes_share_{ending_of(name)}": sent[name] / sent[BASELINE]
        for name in sent
        if name not in {LIMIT, BASELINE}
    }


def training_figures(trainings: Sequence[TrainingCurve]) -> dict[str, float | None]:
    """AUC after equal samples, and time to a target, each against the baseline of the same seed."""
    by_name = _by_contender(trainings)
    baseline = by_name.get(BASELINE, {})
    figures: dict[str, float | None] = {}
    for name, of_seeds in by_name.items():
        if name != BASELINE:
            deltas = [each.auc - baseline[seed].auc for seed, each in of_seeds.items()]
            figures |= Estimate.of(deltas).figures(f"auc_delta_{ending_of(name)}")
            times = [time_ratio(baseline[seed], each) for seed, each in of_seeds.items()]
            found = Estimate.of(times).figures(f"time_to_auc_speedup_{ending_of(name)}")
            figures |= found if min(times) > 0 else dict.fromkeys(found)
    steps = [step for each in trainings for step, _ in each.decisions[:1]]
    if AUTO_NAME in by_name:
        complete = len(steps) == len(by_name[AUTO_NAME])
        figures["auto_decided_at_step"] = max(steps) if complete else None
    return figures


def time_ratio(baseline: TrainingCurve, other: TrainingCurve) -> float:
    """Speed-up of `other` to the AUC of the baseline after 3/4 of the samples; 0: not reached."""
    samples = TARGET_SHARE * baseline.curve[-1]["samples"]
    target = next(each["auc"] for each in baseline.curve if each["samples"] >= samples)
    return baseline.seconds_to(target) / other.seconds_to(target)


def worst_cell(cells: Sequence[Cell]) -> Cell:
    """The cell with the lowest throughput of `auto` over the best comparable contender."""
    return min(cells, key=lambda cell: cell.auto_ratio.value)


def worst_cell_of_all(cells: Sequence[Cell]) -> Cell:
    """The cell with the lowest throughput of `auto` over the best contender."""
    return min(cells, key=lambda cell: cell.whole_table_ratio.value)


def small_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Cells in which an exchange takes at most `SMALL_SHARE` of a step."""
    return [cell for cell in cells if cell.share.value <= SMALL_SHARE]


def wide_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Cells of the wide model with slow links."""
    return [cell for cell in cells if (cell.model, cell.gbit_per_s) == (WIDE, WIDE_GBIT_PER_S)]


def notes_of(
    cells: Sequence[Cell], trainings: Sequence[TrainingCurve], figures: Mapping[str, float | None]
) -> dict[str, str]:
    """Notes that name the cells behind extremes, the errors of `auto`, and reasons of missing figures."""
    worst, worst_of_all, small = worst_cell(cells), worst_cell_of_all(cells), small_cells(cells)
    behind = "; ".join(
        f"{cell.name}: {cell.chosen} where {cell.best} was best" for cell in cells if cell.auto_ratio.high < 1
    )
    decisions = [each.decisions for each in trainings if each.contender == AUTO_NAME]
    notes = {
        "auto_worst_ratio": f"{worst.name}: it chose {worst.chosen}, and {worst.best} was best",
        "auto_worst_ratio_whole_table": (
            f"{worst_of_all.name}: it chose {worst_of_all.chosen}, and {worst_of_all.best_of_all} was best"
        ),
        "auto_best_share": f"clearly not the best: {behind or 'nowhere'}",
        "auto_lossless_share_where_small": f"{len(small)} of {len(cells)} cells are such",
        "auto_decided_at_step": "; ".join(
            ", ".join(f"{name} from step {step} on" for step, name in each) or "not decided"
            for each in decisions
        ),
    }
    for name, value in figures.items():
        if value is None and name.startswith("time_to_auc"):
            notes[name] = "not all seeds reached the target with the same samples"
    return notes


def _lossless_share(cells: Sequence[Cell]) -> float | None:
    return sum(is_lossless(cell.chosen) for cell in cells) / len(cells) if cells else None


def _share(gone: Ratio) -> Ratio:
    """Share of a step, from the speed-up without that part."""
    return Ratio(value=1 - 1 / gone.value, low=1 - 1 / gone.low, high=1 - 1 / gone.high)


def _by_contender(trainings: Iterable[TrainingCurve]) -> dict[str, dict[int, TrainingCurve]]:
    found: dict[str, dict[int, TrainingCurve]] = {}
    for each in trainings:
        found.setdefault(each.contender, {})[each.seed] = each
    return found


def _link_ending(gbit_per_s: float | None) -> str:
    return "unthrottled" if gbit_per_s is None else f"{gbit_per_s:g}gbps"
