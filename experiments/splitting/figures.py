"""Computes the figures of `experiments.splitting`, which that module describes, from its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from experiments.harness.record import Row
from experiments.harness.statistics import Ratio

MAIN_WORKERS: Final = 4
"""Number of workers of the figures whose names hold none: the largest with counted bytes."""
BAG_ENDINGS: Final = {"multi_hot": "", "one_hot": "_one_hot"}
WIRE_DTYPES: Final = ("bf16", "fp16")
"""Values of `sharding.wire_dtype` other than fp32."""
ERROR_ENDINGS: Final = {"gradients": "", "logits": "_logits"}
PLANS: Final = ("torchrec", "des")
PLAN_OF: Final = {frozenset({"exchange"}): "torchrec", frozenset({"split"}): "des"}
"""Plan by the strategies of all its heads."""


@dataclass(frozen=True, kw_only=True)
class PlanCell:
    """Timed rounds of one model, number of workers and link speed."""

    model: str
    workers: int
    gbit_per_s: float | None
    """Speed of a link; None: not limited."""
    rounds: Sequence[Mapping[str, float]]
    """Seconds per step by contender, for each round."""
    chosen: Mapping[str, Any]
    """Strategy of each head that `auto` chose."""

    @property
    def name(self) -> str:
        """Name for readers."""
        return f"{self.model}, {self.workers} workers, {link_name(self.gbit_per_s)}"

    @property
    def plan(self) -> str | None:
        """The plan with the strategies that `auto` chose; None: a mixture of both plans."""
        return plan_with(self.chosen)

    def ratio(self, one: str, other: str) -> Ratio:
        """Throughput of `one` contender over that of the `other`, with its interval."""
        return Ratio.of([each[other] / each[one] for each in self.rounds])

    @property
    def better(self) -> str:
        """The plan with the higher throughput."""
        return "des" if self.ratio("des", "torchrec").value >= 1 else "torchrec"

    @property
    def auto_ratio(self) -> Ratio:
        """Throughput of `auto` over the better plan; exactly 1 if `auto` chose that plan."""
        return self.ratio(self.plan or "auto", self.better)

    @property
    def choice_ratio(self) -> Ratio:
        """Throughput of the choice of `auto` over the other plan; of a mixture, over the better plan."""
        if self.plan is None:
            return self.auto_ratio
        (other,) = {*PLANS} - {self.plan}
        return self.ratio(self.plan, other)


def plan_with(strategies: Mapping[str, Any]) -> str | None:
    """The plan in which all heads have these strategies; None: a mixture of both plans."""
    return PLAN_OF.get(frozenset(strategies.values()))


def strategies_in(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Strategy by path of the head, from the choice file of a run folder."""
    return {path: head["strategy"] for path, head in chosen["heads"].items()}


def link_name(gbit_per_s: float | None) -> str:
    """Name of a link speed for readers."""
    return "unthrottled" if gbit_per_s is None else f"{gbit_per_s:g} Gb/s"


def cells_of(rows: Sequence[Row]) -> list[PlanCell]:
    """All timed cells."""
    names = ("model", "workers", "gbit_per_s", "rounds")
    return [
        PlanCell(chosen=strategies_in(row["chosen"]), **{name: row[name] for name in names})
        for row in rows
        if "rounds" in row
    ]


def figures_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, str]]:
    """All figures, and notes on them, on the commit of timings that were kept too."""
    errors, notes_on_errors = error_figures(rows)
    times, notes = time_figures(cells_of(rows))
    commits = sorted({row["commit"] for row in rows if "rounds" in row and "commit" in row})
    if commits:
        notes["times"] = f"cells were timed at commit {', '.join(commits)}"
    return byte_figures(rows) | errors | times, notes_on_errors | notes


def byte_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of bytes saved, by model and number of workers."""
    figures = {}
    for row in rows:
        if "split" not in row:
            continue
        model, workers = row["model"], row["workers"]
        ending = "" if workers == MAIN_WORKERS else f"_{workers}_workers"
        for bags, of_bags in BAG_ENDINGS.items():
            pulled, sent = row["pull_and_push"][bags], row["id_bytes"][bags]
            figures[f"bytes_saved_{model}{of_bags}{ending}"] = saved(row, pulled)
            figures[f"bytes_saved_{model}_with_ids{of_bags}{ending}"] = saved(row, pulled, sent)
        figures[f"bytes_saved_{model}_a2a{ending}"] = saved(row, row["all_to_all"])
    return figures


def saved(row: Row, against: float, ids: Mapping[str, float] | None = None) -> float:
    """Share of bytes that the better of splitting and exchanging the whole model saves against a baseline.

    Args:
        row: by formula.
        against: bytes of the baseline, including its keys.
        ids: bytes of ids under each of the two plans, to count as well; None: without ids.
    """
    sent = {plan: row[plan] + (ids[plan] if ids else 0) for plan in ("split", "all_to_all")}
    return float(1 - min(sent.values()) / against)


def error_figures(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, str]]:
    """Relative errors by rounding exchanged partial results, of the worst model, which notes name."""
    errors = {row["model"]: row["wire_errors"] for row in rows if "wire_errors" in row}
    figures = {
        f"wire_error_{dtype}{ending}": max(each[dtype][kind] for each in errors.values())
        for dtype in WIRE_DTYPES
        for kind, ending in ERROR_ENDINGS.items()
    }
    worst = {
        f"wire_error_{dtype}": max(errors, key=lambda model: errors[model][dtype]["gradients"])
        for dtype in WIRE_DTYPES
    }
    return figures, worst


def time_figures(cells: Sequence[PlanCell]) -> tuple[dict[str, float], dict[str, str]]:
    """Quality of the planner's choices, and the gain by splitting; notes name the cells behind them."""
    choices = [(cell.name, cell.choice_ratio) for cell in cells]
    worst = min(cells, key=lambda cell: cell.auto_ratio.value)
    best = max(cells, key=lambda cell: cell.ratio("des", "torchrec").value)
    wrong = [name for name, ratio in choices if ratio.high < 1]
    unsure = [name for name, ratio in choices if not (ratio.is_firm or ratio.is_tie)]
    figures = {
        "planner_hits_share": sum(ratio.is_hit for _, ratio in choices) / len(cells),
        "planner_firm_hits_share": sum(ratio.low > 1 for _, ratio in choices) / len(cells),
        "ties_share": sum(ratio.is_tie for _, ratio in choices) / len(cells),
        "open_share": len(unsure) / len(cells),
        **worst.auto_ratio.figures("auto_worst_ratio"),
        **best.ratio("des", "torchrec").figures("best_throughput_ratio"),
    }
    notes = {
        "auto_worst_ratio": worst.name,
        "best_throughput_ratio": best.name,
        "planner_hits_share": (
            f"wrong: {'; '.join(wrong) or 'nowhere'}. Left open: {'; '.join(unsure) or 'nowhere'}"
        ),
    }
    return figures, notes
