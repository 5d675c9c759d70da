"""Evicted rows: a row save holds them besides the rows that a scheme chooses, however many they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from cpr.priority.controls import TouchedTracker
from cpr.priority.tracker import TrackedGroup
from cpr.shards.row_columns import RowColumns


class EvictionTracker(TouchedTracker):
    """Records in one byte a row whether its id was evicted since the row was last saved.

    Otherwise a saved table would keep evicted ids until their rows are used often enough to be chosen.
    """

    sees_lookups = False

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(replace(group, name=f"{group.name}-evicted"))

    @contextmanager
    def watch(self, table: int, columns: RowColumns) -> Iterator[None]:
        """Record the evictions from a table during the block."""

        def note(rows: Tensor) -> None:
            self.values(table)[rows] = self.TOUCHED

        columns.eviction_watchers.append(note)
        yield
        columns.eviction_watchers.remove(note)
