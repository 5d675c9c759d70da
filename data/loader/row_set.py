"""Sets of row numbers, stored as runs of neighbours, so that billions of them need little memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]

Runs = tuple[RowNumbers, RowNumbers]
"""First row of each run, and the row after its last one."""


class RowSet:
    """Ascending, distinct row numbers; a row's position is the number of rows before it.

    Args:
        starts: first row of each run, ascending.
        stops: the row after each run, at most the start of the next run.
    """

    def __init__(self, starts: RowNumbers, stops: RowNumbers) -> None:
        self._starts, self._stops = starts, stops
        self._ends = np.cumsum(stops - starts)

    @classmethod
    def span(cls, start: int, stop: int) -> "RowSet":
        """All of `range(start, stop)`."""
        return cls(np.array([start], np.int64), np.array([stop], np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def part(self, begin: int, end: int) -> RowNumbers:
        """The rows at positions `begin` to `end`, ascending."""
        starts, stops = self._runs(begin, end)
        if len(starts) == 1:
            return np.arange(starts[0], stops[0])
        lengths = stops - starts
        return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())

    def only(self, positions: Sequence[tuple[int, int]], also: RowNumbers) -> "RowSet":
        """The set of the rows at these ranges of positions together with the rows `also`."""
        kept = [self._runs(begin, end) for begin, end in positions]
        starts, stops = map(np.concatenate, zip(*kept, _runs_of(np.sort(also)), strict=True))
        ascending = np.argsort(starts)
        starts, stops = starts[ascending], stops[ascending]
        begins = np.ones(len(starts), bool)
        begins[1:] = starts[1:] != stops[:-1]  # a run that continues the one before is merged with it
        return RowSet(starts[begins], stops[np.roll(begins, -1)])

    def _runs(self, begin: int, end: int) -> Runs:
        """Runs of the rows at positions `begin` to `end`."""
        if begin >= end:
            return _runs_of(np.empty(0, np.int64))
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        starts, stops = self._starts[first : last + 1].copy(), self._stops[first : last + 1].copy()
        stops[-1] -= self._ends[last] - end
        starts[0] = self._stops[first] - (self._ends[first] - begin)
        return starts, stops


def _runs_of(rows: RowNumbers) -> Runs:
    """Convert ascending rows to runs."""
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts = np.append(0, breaks + 1)[: len(rows)]
    lasts = np.append(breaks, len(rows) - 1)[: len(rows)]
    return rows[firsts], rows[lasts] + 1
