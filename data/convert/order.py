"""The order of all rows: days, time within days, and where files and row groups begin.

The rows of every run are sorted by time, so that any range of the sorted whole is a slice of each run. Where
the slices begin is found by bisection of the time, and equal times count in the order of the input. The order
does not depend on how the input was cut into runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.schema import Schema
from data.schema.definition import DEFAULT_PARTS, MOST_DAYS

DAY_US = 86_400_000_000

Times = NDArray[np.int64]
Cuts = NDArray[np.int64]
"""Positions in runs: int64 `[cuts, runs]`."""


@dataclass(frozen=True)
class Sorted:
    """Sorted runs, of which row ranges are found.

    Attributes:
        times: ascending times of each run, or None if rows are in the order of the input.
        sizes: int64 `[runs]`, rows of each run.
    """

    times: Sequence[Times] | None
    sizes: NDArray[np.int64]

    def cuts(self, ranks: Sequence[int] | NDArray[np.int64]) -> Cuts:
        """Positions in the runs before which `ranks` rows of the sorted whole lie."""
        wanted = np.asarray(ranks, np.int64)
        if self.times is None:
            left, ties = np.zeros((len(wanted), len(self.sizes)), np.int64), self.sizes[None, :]
        else:
            at = self._times_at(wanted)
            left = self._counts(at, "left")
            ties = self._counts(at, "right") - left
        spare: Cuts = wanted[:, None] - left.sum(axis=1, keepdims=True)
        taken: Cuts = np.clip(spare - (np.cumsum(ties, axis=1) - ties), 0, ties)
        return left + taken

    def before(self, times: Times) -> Cuts:
        """Positions in the runs of the first row that is not before each of `times`."""
        return self._counts(times, "left")

    def slices(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> "Sorted":
        """The rows `starts` to `stops` of each run."""
        times = self.times
        if times is not None:
            times = [run[start:stop] for run, start, stop in zip(times, starts, stops, strict=True)]
        return Sorted(times, stops - starts)

    def _times_at(self, ranks: NDArray[np.int64]) -> Times:
        """Smallest times up to which at least `ranks` rows lie, by bisection."""
        assert self.times is not None
        filled = [run for run in self.times if len(run)]
        low = np.full(len(ranks), min((int(run[0]) for run in filled), default=0), np.int64)
        high = np.full(len(ranks), max((int(run[-1]) for run in filled), default=0), np.int64)
        while (low < high).any():
            middle = (low & high) + ((low ^ high) >> 1)  # their mean; a difference could overflow
            enough = self._counts(middle, "right").sum(axis=1) >= ranks
            high = np.where(enough, middle, high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        return low

    def _counts(self, times: Times, side: str) -> Cuts:
        assert self.times is not None
        columns = [np.searchsorted(run, times, side=side) for run in self.times]  # type: ignore[call-overload]
        return np.stack(columns, axis=1).astype(np.int64)


def days_of(schema: Schema, runs: Sorted, named: Sequence[Mapping[int, int]]) -> dict[int, tuple[Cuts, Cuts]]:
    """Split all rows into days.

    Args:
        schema: says how.
        runs: all runs, sorted by day if a column says it, then by time.
        named: for each run, its rows by day, where a column says the day.

    Returns:
        For each day, in order, where its rows begin and end in each run, int64 `[runs]`.

    Raises:
        ValueError: there are too many days.
    """
    split, total = schema.split, int(runs.sizes.sum())
    if split.column:
        return _named_days(named)
    if split.parts is None and split.test is None and schema.time is not None:
        return _calendar_days(runs, DAY_US if schema.time.unit != "day" else 1)
    if split.test is not None:
        ranks = [0, round(total * (1 - split.test)), total]
    else:
        parts = split.parts or DEFAULT_PARTS
        ranks = [total * part // parts for part in range(parts + 1)]
    return _between(runs.cuts(ranks), list(range(len(ranks) - 1)))


def _calendar_days(runs: Sorted, length: int) -> dict[int, tuple[Cuts, Cuts]]:
    assert runs.times is not None
    days: set[int] = set()
    for run in runs.times:
        days.update(np.unique(run // length).tolist())
        if len(days) > MOST_DAYS:
            raise ValueError(
                f"the time column spans more than {MOST_DAYS:,} days; check unit and format in [time], or "
                "give [split] parts"
            )
    listed = sorted(days)
    starts = runs.before(np.array(listed, np.int64) * length)
    cuts = np.concatenate([starts, runs.sizes[None, :]])
    first = listed[0] if length > 1 and listed else 0
    return _between(cuts, [day - first for day in listed])


def _named_days(named: Sequence[Mapping[int, int]]) -> dict[int, tuple[Cuts, Cuts]]:
    days = sorted({day for run in named for day in run})
    sizes = np.array([[run.get(day, 0) for run in named] for day in days], np.int64)
    cuts = np.concatenate(
        [np.zeros((1, len(named)), np.int64), np.cumsum(sizes.reshape(-1, len(named)), axis=0)]
    )
    return _between(cuts, days)


def _between(cuts: Cuts, days: Sequence[int]) -> dict[int, tuple[Cuts, Cuts]]:
    pairs = {day: (cuts[at], cuts[at + 1]) for at, day in enumerate(days)}
    return {day: pair for day, pair in pairs.items() if (pair[1] > pair[0]).any()}
