"""Figures of `experiments.growth` from its rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import linear_regression, median
from typing import Final

from experiments.harness.record import Row

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
        value = METRICS[metric](row.get(contender, {})) if row["axis"] == axis else None
        if value is not None:
            found.setdefault(row["value"], []).append(value)
    return {value: median(found[value]) for value in sorted(found)}


def axes_of(rows: Sequence[Row]) -> list[str]:
    """The axes of these rows, in their order."""
    return list(dict.fromkeys(row["axis"] for row in rows))


def exponents(points: Mapping[int, float]) -> tuple[float, float, float]:
    """Exponent of a power law through positive points, and the least and greatest between neighbours."""
    logs = [(math.log(value), math.log(measured)) for value, measured in points.items()]
    between = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(logs)]
    fitted, _ = linear_regression(*zip(*logs, strict=True))
    return fitted, min(between), max(between)


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
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
    return figures
