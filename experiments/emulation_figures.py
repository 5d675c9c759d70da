"""From rows of emulated runs to figures: differences to the run without failures, means, intervals, slopes.

Runs of one seed share everything but the scheme, so that differences are taken within a seed, and a seed
counts once: intervals are Student's t over seeds. They hold what differs between seeds, above all when and
where the failures come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean
from typing import Final

import numpy as np

from experiments.emulation import NO_FAILURE, Run
from experiments.precision import half_width
from experiments.record import Row

TEN_THOUSANDTHS: Final = 1e4
"""The unit in which pictures show differences of AUC."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % confidence interval."""

    value: float
    ci: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """From one value a seed, two at least."""
        return cls(mean(values), half_width(values))

    def figures(self, name: str) -> dict[str, float]:
        """As figures of a result: the value, and its interval under `..._ci`."""
        return {name: self.value, f"{name}_ci": self.ci}


def run_of(row: Row) -> Run:
    """The run that a row was measured in."""
    return Run(**{field.name: row[field.name] for field in fields(Run)})


def setting_of(run: Run) -> Run:
    """What the runs of all seeds have in common."""
    return replace(run, seed=0)


def deltas(rows: Sequence[Row], value: str = "auc") -> dict[Run, float]:
    """`value` minus that of the run without failures, for each run with failures."""
    found = {run_of(row): row[value] for row in rows}
    return {
        run: measured - found[run.without_failures]
        for run, measured in found.items()
        if run.scheme != NO_FAILURE
    }


def by_setting(values: Mapping[Run, float]) -> dict[Run, list[float]]:
    """The values of each setting, one a seed."""
    grouped: dict[Run, list[float]] = {}
    for run, value in values.items():
        grouped.setdefault(setting_of(run), []).append(value)
    return grouped


def estimates(rows: Sequence[Row], value: str = "auc") -> dict[Run, Estimate]:
    """The mean difference to the run without failures, for each setting."""
    return {run: Estimate.of(values) for run, values in by_setting(deltas(rows, value)).items()}


def slope(points: Mapping[Run, tuple[float, float]]) -> Estimate:
    """How much y grows with x, on a line through the origin: a least-squares fit within each seed.

    Args:
        points: x and y of each run.
    """
    seeds: dict[int, list[tuple[float, float]]] = {}
    for run, point in points.items():
        seeds.setdefault(run.seed, []).append(point)
    fitted = []
    for seed in sorted(seeds):
        x, y = np.array(seeds[seed]).T
        fitted.append(float(x @ y / (x @ x)))
    return Estimate.of(fitted)


def correlation(points: Mapping[Run, tuple[float, float]]) -> float:
    """Pearson's, over all runs."""
    x, y = np.array(list(points.values())).T
    return float(np.corrcoef(x, y)[0, 1])
