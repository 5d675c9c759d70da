"""MFU: saves the most frequently used rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.priority.backlog import Backlog
from cpr.priority.tracker import RowTracker, TrackedGroup, top_rows
from cpr.shards.lookups import Lookups

DENSE: Final = 4
"""Rows per lookup up to which counting goes over the whole table, which is faster but costs time per row."""
SURE: Final = 32
"""Counted lookups of the least used row of a choice that suffice to choose nearly the same rows. If ids
follow Zipf's law with an exponent of 0.6 or more, saves then hold 0.99 of the lookups that they hold with all
passes counted (`tests/cpr/priority/test_frequency.py`)."""
MOST: Final = 8
"""At least one of this many passes is counted."""
GOLDEN: Final = 0x9E3779B1
"""2^32 over the golden ratio: the middle bits of its multiples are spread evenly."""


class FrequencyTracker(RowTracker):
    """Counts each row's lookups since its last save, in 4 bytes a row (CPR-MFU).

    The paper leaves open, here: every lookup counts, so an id that a batch has five times counts five times;
    ties go to the lowest rows. The limit of a count, 2^31 - 1, is reached by a row with 2,000 lookups in each
    step after a million steps without a save.

    All passes are counted until a choice fills every table's budget with rows that were looked up `2 * SURE`
    times or more. Then only one of `period` passes is, and its lookups count that many times. The period is
    such that the least used row of that choice would still have been counted `SURE` times. So a table whose
    changed rows fit its budget has exact counts, and none of these rows is passed over. Of the passes of a
    period, a pseudo-random one is counted, as data may be periodic, too.

    On the CPU lookups are counted some batches at a time (`Backlog`), table by table.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._is_on_cpu: Final = group.device.type == "cpu"
        self._features: Final[dict[int, list[int]]] = {}
        """Features of each prioritised table."""
        for feature, table in enumerate(group.layout.feature_tables):
            if group.tables[table].budget:
                self._features.setdefault(table, []).append(feature)
        self.period = 1
        """One of this many passes is counted."""
        self._num_passes = 0
        self._least: Final = dict.fromkeys(self._features, 0)
        """Count of the least used row of each table's last choice; 0: the choice did not fill the budget."""
        self._saving: Final[dict[int, Tensor]] = {}
        self._backlog: Final = Backlog(group, self._count)

    def wants_pass(self) -> bool:
        """Whether the next pass is counted."""
        number, place = divmod(self._num_passes, self.period)
        self._num_passes += 1
        return place == (number * GOLDEN >> 16) % self.period

    def see(self, lookups: Lookups) -> None:
        """Count the lookups, now or before the counts are read."""
        self._backlog.see(lookups)

    def values(self, table: int) -> Tensor:
        """The live counts of a table's rows: `[num_rows]`."""
        self._backlog.sweep()
        return super().values(table)

    def choose(self, table: int) -> Tensor:
        """The rows with the highest counts."""
        values = self.values(table)
        rows = top_rows(values, self._tables[table].budget)
        # subtracted at `confirm`, to keep lookups in the meantime
        chosen = self._saving[table] = values[rows]
        self._note_least(table, int(chosen.min()) if rows.numel() == self._tables[table].budget else 0)
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """Keep only counts since the choice."""
        self.values(table)[rows] -= self._saving.pop(table)

    def take_back(self, table: int, rows: Tensor) -> None:
        """Keep all counts."""
        del self._saving[table]

    def forget(self, table: int, rows: Tensor | None) -> None:
        """See `Tracker.forget`."""
        super().forget(table, rows)
        if rows is None:
            self._note_least(table, 0)

    def state_dict(self) -> dict[str, Any]:
        """What decides which passes are counted."""
        return {"num_passes": self._num_passes, "least": list(self._least.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tracker.load_state_dict`."""
        if state:  # earlier versions counted every pass and had no state
            self._num_passes = int(state["num_passes"])
            for table, least in zip(self._least, state["least"], strict=True):
                self._note_least(table, least)

    def _note_least(self, table: int, least: int) -> None:
        """Set the period; the backlog holds no pass that was counted with another one."""
        if table not in self._least:
            return
        self._least[table] = least
        self.period = min(max(min(self._least.values()) // SURE, 1), MOST)

    def _count(self, passes: Sequence[Lookups]) -> None:
        if self._is_on_cpu:
            self._count_by_table(passes)
        else:  # on a GPU one operation for all tables is fastest
            for lookups in passes:
                self._add(self._values, lookups.rows)

    def _count_by_table(self, passes: Sequence[Lookups]) -> None:
        ids = [each.ids.numpy() for each in passes]
        ends = [each.ends.tolist() for each in passes]
        for table, features in self._features.items():
            looked_up = [
                of_pass[end[feature] : end[feature + 1]]
                for of_pass, end in zip(ids, ends, strict=True)
                for feature in features
            ]
            found = np.concatenate(looked_up, dtype=np.int64)
            counts = super().values(table)
            if found.size and counts.numel() <= DENSE * found.size:
                # a third of a scatter's time per lookup, and some time per row
                new = np.bincount(found)
                counts.numpy()[: new.size] += new.astype(np.int32) * self.period
            elif found.size:
                self._add(counts, torch.from_numpy(found))

    def _add(self, counts: Tensor, rows: Tensor) -> None:
        counts.scatter_add_(0, rows, counts.new_full(rows.shape, self.period))
