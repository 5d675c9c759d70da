"""From rows of emulated runs to figures: differences to the run without failures, means, intervals, slopes.

Runs of one seed share everything but the scheme, so that differences are taken within a seed, and a seed
counts once: intervals are Student's t over seeds. They cover what differs between seeds, above all when and
where failures happen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Final

import numpy as np

from experiments.emulation.emulation import NO_FAILURE, Run
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate, Interval

NETWORKS: Final = {
    "": ("dlrm", "rowwise_adagrad"),
    "_sgd": ("dlrm", "sgd"),
    "_dcnv2": ("dcnv2", "rowwise_adagrad"),
}
"""Network and optimizer by the ending of the figures."""
NETWORK_NAMES: Final = {
    "": "DLRM, row-wise Adagrad",
    "_sgd": "DLRM, SGD",
    "_dcnv2": "DCN-v2, row-wise Adagrad",
}
"""In pictures, by the ending of the figures."""
SCHEME_NAMES: Final = {
    "mfu": "MFU: most frequently used rows first",
    "ssu": "SSU: a sample of the used rows first",
    "scar": "SCAR: most changed rows first",
    "vanilla": "all rows alike",
    "naive": "all rows alike, at full recovery's interval",
    "random": "random rows",
    "never": "no row of a large table",
    "mru": "most recently used rows first",
    "round_robin": "all rows in turn",
    "touched": "all rows that changed",
}
"""What is saved, in pictures, by scheme."""
NEARLY_ONE: Final = 1 - 1e-12
"""The largest correlation on Fisher's scale, which ends before 1."""


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
    """Estimate for each setting the mean difference to the run without failures."""
    return {run: Estimate.of(values) for run, values in by_setting(deltas(rows, value)).items()}


def slope(points: Mapping[Run, tuple[float, float]]) -> Estimate:
    """Fit a line through the origin to the points of each seed, by least squares, and average the slopes.

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


def correlation(points: Mapping[Run, tuple[float, float]]) -> Interval:
    """Pearson's correlation over all runs, from x and y of each run, of two seeds at least.

    Runs of a seed share their failures, so that a seed counts once: the interval is that of a jackknife which
    leaves out one seed after the other, on Fisher's scale (`arctanh`), with Student's t.
    """
    seeds = sorted({run.seed for run in points})
    whole = _pearson(list(points.values()))
    without = [_pearson([xy for run, xy in points.items() if run.seed != seed]) for seed in seeds]
    scaled, *fewer = np.arctanh(np.clip([whole, *without], -NEARLY_ONE, NEARLY_ONE))
    reach = Estimate.of([len(seeds) * scaled - (len(seeds) - 1) * each for each in fewer]).half_width
    return Interval(value=whole, low=float(np.tanh(scaled - reach)), high=float(np.tanh(scaled + reach)))


def _pearson(points: Sequence[tuple[float, float]]) -> float:
    x, y = np.array(points).T
    return float(np.corrcoef(x, y)[0, 1])
