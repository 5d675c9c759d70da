"""Computes the figures of `experiments.communication`, which that module describes, from its rows."""

from collections.abc import Callable, Mapping, Sequence
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

Figures = dict[str, float | None]
Notes = dict[str, str]


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


TRAINED_LAYOUT: Final = NodeLayout(workers=2)
TRAINED_GBIT_PER_S: Final = 1.0


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
        return self._fastest(self.rounds, is_comparable)

    @property
    def best_of_all(self) -> str:
        """The fastest contender with an exchange, comparable or not."""
        return self._fastest(self._shared, _exchanges)

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
        halves = rounds[::2], rounds[1::2]
        pooled: list[float] = []
        for judging, compared in (halves, halves[::-1]):
            pooled += ratios(compared, self.chosen, self._fastest(judging, among, rounds[-1]))
        return _interval(pooled)

    def _fastest(
        self, rounds: Rounds, among: Callable[[str], bool], last: Mapping[str, float] | None = None
    ) -> str:
        """The fastest contender in these rounds of those that are in the last round."""
        return max(
            filter(among, last or rounds[-1]), key=lambda name: median(ratios(rounds, name, self.chosen))
        )

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
    names = ("model", "gbit_per_s", "rounds", "link_bytes", "chosen")
    return [
        Cell(
            layout=NodeLayout(workers=row["workers"], per_node=row["per_node"]),
            **{name: row[name] for name in names},
        )
        for row in rows
        if "chosen" in row
    ]


def trainings_of(rows: Sequence[Row]) -> list[TrainingCurve]:
    """All trainings."""
    names = ("contender", "seed", "curve", "decisions")
    return [
        TrainingCurve(**{name: row[name] for name in names if name in row}) for row in rows if "curve" in row
    ]


def figures_of(rows: Sequence[Row]) -> tuple[Figures, Notes]:
    """All figures, and notes on them."""
    steps, notes_on_steps = step_figures(cells_of(rows))
    trained, notes_on_trainings = training_figures(trainings_of(rows))
    figures = share_figures(rows) | steps | trained | {"table_vi_hits": table_vi_hits()}
    return figures, notes_on_steps | notes_on_trainings


def share_figures(rows: Sequence[Row]) -> Figures:
    """The dense exchange's share of a step of whole models."""
    figures: Figures = {}
    for row in rows:
        if "share_of" in row:
            link = "unthrottled" if row["gbit_per_s"] is None else f"{row['gbit_per_s']:g}gbps"
            name = f"dense_share_{row['share_of']}_{NodeLayout(workers=row['workers']).ending}_{link}"
            figures |= share_of(row).figures(name)
    return figures


def share_of(row: Row) -> Ratio:
    """Share of a whole model's step that ends if only scalars are exchanged."""
    return _share(_interval(ratios(row["rounds"], LIMIT, "dense")))


def step_figures(cells: Sequence[Cell]) -> tuple[Figures, Notes]:
    """Quality of `auto`, and its gain on the wide model; notes name the cells behind extremes."""
    worst = min(cells, key=lambda cell: cell.auto_ratio.value)
    worst_of_all = min(cells, key=lambda cell: cell.whole_table_ratio.value)
    small = [cell for cell in cells if cell.share.value <= SMALL_SHARE]
    behind = "; ".join(
        f"{cell.name}: {cell.chosen} where {cell.best} was best" for cell in cells if cell.auto_ratio.high < 1
    )
    figures: Figures = {
        **worst.auto_ratio.figures("auto_worst_ratio"),
        **worst_of_all.whole_table_ratio.figures("auto_worst_ratio_whole_table"),
        "auto_best_share": sum(cell.auto_ratio.high >= 1 for cell in cells) / len(cells),
        "auto_lossless_share": _lossless_share(cells),
        "auto_lossless_share_where_small": _lossless_share(small),
    }
    notes = {
        "auto_worst_ratio": f"{worst.name}: it chose {worst.chosen}, and {worst.best} was best",
        "auto_worst_ratio_whole_table": (
            f"{worst_of_all.name}: it chose {worst_of_all.chosen}, and {worst_of_all.best_of_all} was best"
        ),
        "auto_best_share": f"clearly not the best: {behind or 'nowhere'}",
        "auto_lossless_share_where_small": f"{len(small)} of {len(cells)} cells are such",
    }
    wide = [cell for cell in cells if (cell.model, cell.gbit_per_s) == (WIDE, WIDE_GBIT_PER_S)]
    if wide:
        slowest = min(wide, key=lambda cell: cell.ratio(cell.chosen, BASELINE).value)
        figures |= slowest.ratio(slowest.chosen, BASELINE).figures("wide_1gbps_speedup")
        sent = wide[0].link_bytes
        figures |= {
            f"bytes_share_{ending_of(name)}": sent[name] / sent[BASELINE]
            for name in sent
            if name not in {LIMIT, BASELINE}
        }
    for cell in wide:
        figures |= cell.ratio(cell.chosen, BASELINE).figures(f"wide_1gbps_speedup_{cell.layout.ending}")
        figures |= cell.share.figures(f"dense_share_wide_{cell.layout.ending}_1gbps")
    return figures, notes


def training_figures(trainings: Sequence[TrainingCurve]) -> tuple[Figures, Notes]:
    """Compare AUC after equal samples and time to a target with the baseline of the same seed."""
    by_name: dict[str, dict[int, TrainingCurve]] = {}
    for each in trainings:
        by_name.setdefault(each.contender, {})[each.seed] = each
    baseline = by_name.pop(BASELINE, {})
    figures: Figures = {}
    notes: Notes = {}
    for name, of_seeds in by_name.items():
        deltas = [each.auc - baseline[seed].auc for seed, each in of_seeds.items()]
        figures |= Estimate.of(deltas).figures(f"auc_delta_{ending_of(name)}")
        times = [time_ratio(baseline[seed], each) for seed, each in of_seeds.items()]
        found = Estimate.of(times).figures(f"time_to_auc_speedup_{ending_of(name)}")
        if min(times) > 0:
            figures |= found
        else:
            figures |= dict.fromkeys(found)
            notes |= dict.fromkeys(found, "not all seeds reached the target with the same samples")
    decisions = [each.decisions for each in by_name.get(AUTO_NAME, {}).values()]
    if decisions:
        figures["auto_decided_at_step"] = max(each[0][0] for each in decisions) if all(decisions) else None
        notes["auto_decided_at_step"] = "; ".join(
            ", ".join(f"{name} from step {step} on" for step, name in each) or "not decided"
            for each in decisions
        )
    return figures, notes


def time_ratio(baseline: TrainingCurve, other: TrainingCurve) -> float:
    """Speed-up of `other` to the AUC of the baseline after 3/4 of the samples; 0: not reached."""
    samples = TARGET_SHARE * baseline.curve[-1]["samples"]
    target = next(each["auc"] for each in baseline.curve if each["samples"] >= samples)
    return baseline.seconds_to(target) / other.seconds_to(target)


def _lossless_share(cells: Sequence[Cell]) -> float | None:
    return sum(is_lossless(cell.chosen) for cell in cells) / len(cells) if cells else None


def _share(gone: Ratio) -> Ratio:
    """Share of a step, from the speed-up without that part."""
    return Ratio(value=1 - 1 / gone.value, low=1 - 1 / gone.low, high=1 - 1 / gone.high)
