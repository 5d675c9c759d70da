"""Figures of `experiments.growth` from its rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import linear_regression, median
from typing import Final

from experiments.growth.axes import BIG, BIG_SETTINGS
from experiments.harness.record import Row
from experiments.harness.statistics import median_figures

GB: Final = 1e9
CONTENDERS: Final = ("ours", "rival")
METRICS: Final[Mapping[str, Callable[[Row], float | None]]] = {
    "start": lambda row: _total(row, "start"),
    "build": lambda row: build_s(row["start"]) if "start" in row else None,
    "plan": lambda row: row.get("plan_s"),
    "step": lambda row: row.get("step_s"),
    "track": lambda row: row.get("track_s"),
    "save_wait": lambda row: row.get("save_blocked_s"),
    "save": lambda row: row.get("save_committed_s"),
    "row_save": lambda row: row.get("row_save_committed_s"),
    "load": lambda row: (row.get("resume") or row.get("kill") or {}).get("restored"),
    "kill": lambda row: _total(row, "kill"),
    "node": lambda row: _total(row, "node"),
    "memory": lambda row: row["peak_bytes"] - row["table_bytes"] if "peak_bytes" in row else None,
    "first_batch": lambda row: row.get("first_batch_s"),
    "next_batch": lambda row: row.get("next_batch_s"),
}
"""What is measured of a contender; None: not of this one."""


def build_s(start: Row) -> float:
    """Seconds that a first start takes for the model with its initial values, which are set after it."""
    return float(start["built"] + start["restored"])


def _total(row: Row, name: str) -> float | None:
    return sum(row[name].values()) if name in row else None


def curve(rows: Sequence[Row], axis: str, contender: str, metric: str) -> dict[int, float]:
    """Median of a metric by value on an axis, ascending."""
    found: dict[int, list[float]] = {}
    for row in rows:
        value = METRICS[metric](row.get(contender, {})) if row.get("axis") == axis else None
        if value is not None:
            found.setdefault(row["value"], []).append(value)
    return {value: median(found[value]) for value in sorted(found)}


def axes_of(rows: Sequence[Row]) -> list[str]:
    """The axes of these rows, in their order."""
    return list(dict.fromkeys(row["axis"] for row in rows if "axis" in row))


def exponents(points: Mapping[int, float]) -> tuple[float, float, float]:
    """Exponent of a power law through positive points, and the least and greatest between neighbours."""
    logs = [(math.log(value), math.log(measured)) for value, measured in points.items()]
    between = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(logs)]
    fitted, _ = linear_regression(*zip(*logs, strict=True))
    return fitted, min(between), max(between)


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    steps = [row for row in rows if "setting" in row]
    rows = [row for row in rows if "axis" in row]
    figures: dict[str, float] = _big_steps(steps)
    for axis in axes_of(rows):
        for metric in METRICS:
            for contender in CONTENDERS:
                points = curve(rows, axis, contender, metric)
                if len(points) > 1 and min(points.values()) > 0:
                    name = f"growth_exponent_{'rival_' * (contender == 'rival')}{metric}_{axis}"
                    endings = ("", "_low", "_high")
                    figures |= {
                        f"{name}{ending}": each
                        for ending, each in zip(endings, exponents(points), strict=True)
                    }
    return figures | _big([row for row in rows if (row["axis"], row["value"]) == (BIG.axis, BIG.value)])


def _big_steps(rows: Sequence[Row]) -> dict[str, float]:
    """Rate of our fastest setting in each round over that of TorchRec's, on the largest job's tables."""
    rates: dict[int, dict[str, list[float]]] = {}
    trainers = {each.name: each.trainer for each in BIG_SETTINGS}
    for row in rows:
        of_round = rates.setdefault(row["round"], {name: [] for name in trainers.values()})
        of_round[trainers[row["setting"]]].append(row["samples_per_s"])
    found = [max(each["ours"]) / max(each["torchrec"]) for each in rates.values()]
    return median_figures("big_ratio_to_torchrec", found) if found else {}


def _big(rows: Sequence[Row]) -> dict[str, float]:
    """Figures of the largest job."""
    if not rows:
        return {}
    ours, rival = ([row[name] for row in rows] for name in CONTENDERS)
    found = {"big_rows": float(BIG.value), "big_gb": ours[0]["table_bytes"] / GB}

    def add(name: str, of: Callable[[Row, Row], float]) -> None:
        found.update(median_figures(name, [of(*pair) for pair in zip(ours, rival, strict=True)]))

    add("big_kill_to_step_s", lambda mine, _: sum(mine["kill"].values()))
    add("big_rival_kill_to_step_s", lambda _, other: sum(other["kill"].values()))
    add("big_kill_ratio", lambda mine, other: sum(mine["kill"].values()) / sum(other["kill"].values()))
    add("big_node_ratio", lambda mine, other: sum(mine["node"].values()) / sum(other["kill"].values()))
    add("big_start_ratio", lambda mine, other: sum(mine["start"].values()) / sum(other["start"].values()))
    add("big_build_s", lambda mine, _: build_s(mine["start"]))
    add("big_build_ratio", lambda mine, _: build_s(mine["start"]) / mine["write_s"])
    add("big_step_ratio", lambda mine, other: mine["step_s"] / other["step_s"])
    add("big_save_gb_per_s", lambda mine, _: mine["save_bytes"] / mine["save_committed_s"] / GB)
    add(
        "big_memory_overhead",
        lambda mine, other: (mine["peak_bytes"] - other["trained_bytes"]) / mine["table_bytes"],
    )
    return found
