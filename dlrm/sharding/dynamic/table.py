"""A dynamic table: which id has which row, who gets one, and who has to give it back.

All decisions follow from the order of the batches and the columns of the rows alone. So a run that goes on
from a checkpoint decides as the one that was interrupted, and what is not a column of a row (index, free
rows, clock) is derived from the columns whenever rows were written from outside.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from dlrm.sharding.dynamic.candidates import COLUMNS as CANDIDATE_COLUMNS
from dlrm.sharding.dynamic.candidates import Candidates
from dlrm.sharding.dynamic.hashing import initial_values
from dlrm.sharding.dynamic.index import NOTHING, IdIndex

EVICTION_SHARE: Final = 16
"""At least every 16th row is freed at a time: the index is made anew after it, which takes a while."""


def columns_of_rows(admit_after: int) -> dict[str, torch.dtype]:
    """The columns that a dynamic table adds to its rows."""
    columns = {"id": torch.int64, "last_seen": torch.int32}
    return columns | CANDIDATE_COLUMNS if admit_after > 1 else columns


class DynamicTable:
    """The rows of a table, given to ids.

    An id gets a row in the training pass in which it is seen for the `admit_after`-th time, with initial
    values that depend on the seed, the table's name and the id alone. If no row is free then, the ids that
    were not seen for longest lose theirs, with all that was learned; never one that is in the batch itself.
    If a batch brings more new ids than there can be rows, those that it has most often get them.

    Args:
        name: of the table.
        weights: live, float `[capacity, columns]`.
        state: of the optimizer, live, `[capacity, ...]` each; zeros for a new row.
        columns: `columns_of_rows`, live, `[capacity]` each.
        admit_after: sightings in training after which an id gets a row; 1: at once.
        seed: of the initial values.
    """

    def __init__(
        self,
        name: str,
        weights: Tensor,
        state: Sequence[Tensor],
        columns: Mapping[str, Tensor],
        *,
        admit_after: int,
        seed: int,
    ) -> None:
        self.name = name
        self._weights, self._state = weights, list(state)
        self._ids, self._last_seen = columns["id"], columns["last_seen"]  # last seen 0: a free row
        self._candidates = Candidates(columns) if admit_after > 1 else None
        self._admit_after, self._seed = admit_after, seed
        self._index: IdIndex | None = None
        self._free = self._ids.new_empty(0)
        self._clock = 0

    @property
    def capacity(self) -> int:
        """Rows."""
        return self._ids.numel()

    @property
    def num_ids(self) -> int:
        """Ids that have a row."""
        return int((self._last_seen > 0).sum())

    def forget_derived(self) -> None:
        """Rows were written from outside: what is derived from them no longer holds."""
        self._index = None

    def find(self, ids: Tensor) -> Tensor:
        """Row of each id, int64 `[n]`; -1: it has none. Nothing changes."""
        return self._current_index().find(ids)

    def train_on(self, ids: Tensor) -> Tensor:
        """Row of each id of a training pass, int64 `[n]`; -1: it has none (yet).

        Args:
            ids: int64 `[n]`, as often as they come.
        """
        index = self._current_index()
        self._clock += 1
        rows = index.find(ids)
        missing = rows == NOTHING
        self._last_seen[rows[~missing]] = self._clock
        if not bool(missing.any()):
            return rows
        unknown, places, counts = torch.unique(ids[missing], return_inverse=True, return_counts=True)
        rows[missing] = self._admit(unknown, counts)[places]
        return rows

    def _admit(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Rows for the ids without one, as far as they deserve it; -1 for the others.

        Args:
            ids: int64 `[m]`, ascending, without duplicates.
            counts: how often each is in the batch.
        """
        if self._candidates is not None:
            counts = counts + self._candidates.counts(ids)
        chosen = (counts >= self._admit_after).nonzero().squeeze(1)
        room = self._make_room(chosen.numel())
        if room < chosen.numel():
            most = counts[chosen].argsort(descending=True, stable=True)[:room]
            chosen = chosen[most.sort().values]
        new, self._free = self._free[: chosen.numel()], self._free[chosen.numel() :]
        rows = torch.full_like(ids, NOTHING)
        rows[chosen] = new
        self._begin(new, ids[chosen])
        if self._candidates is not None:
            waiting = rows == NOTHING
            self._candidates.forget(ids[chosen])
            self._candidates.remember(ids[waiting], counts[waiting])
        return rows

    def _begin(self, rows: Tensor, ids: Tensor) -> None:
        """Rows for new ids; they count when they are complete, for the worker may be killed in between."""
        bound = self.capacity**-0.5
        values = initial_values(ids, self._weights.shape[1], bound, self._seed, self.name)
        self._weights[rows] = values.to(self._weights.dtype)
        for state in self._state:
            state[rows] = 0
        self._ids[rows] = ids
        self._last_seen[rows] = self._clock
        self._current_index().add(rows)

    def _make_room(self, wanted: int) -> int:
        """Evict ids if fewer rows are free than wanted.

        Returns:
            Rows that can be had: as many as wanted, or fewer, if too many ids are in use by this pass.
        """
        num_free = self._free.numel()
        if num_free < wanted:
            num_idle = int((self._last_seen < self._clock).sum()) - num_free
            num = min(num_idle, max(wanted - num_free, self.capacity // EVICTION_SHARE))
            if num:
                oldest = self._last_seen.argsort(stable=True)  # free rows are the first
                self._last_seen[oldest[num_free : num_free + num]] = 0
                self._derive_index()
        return min(wanted, self._free.numel())

    def _current_index(self) -> IdIndex:
        if self._index is None:
            self._clock = int(self._last_seen.max())
            self._free_older_twins()
            return self._derive_index()
        return self._index

    def _derive_index(self) -> IdIndex:
        used = self._last_seen > 0
        self._free = (~used).nonzero().squeeze(1)
        self._index = IdIndex(self._ids, used.nonzero().squeeze(1))
        return self._index

    def _free_older_twins(self) -> None:
        """Leave each id the row in which it was seen last.

        It has several where rows were restored from different moments: it moved in between.
        """
        used = (self._last_seen > 0).nonzero().squeeze(1)
        used = used[self._last_seen[used].argsort(descending=True, stable=True)]
        used = used[self._ids[used].argsort(stable=True)]
        ids = self._ids[used]
        self._last_seen[used[1:][ids[1:] == ids[:-1]]] = 0
