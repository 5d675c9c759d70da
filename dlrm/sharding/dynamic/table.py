"""Assigns the rows of a dynamic table to ids, and takes them back.

All decisions follow from the order of the batches and the columns of the rows alone, so that a run resumed
from a checkpoint decides like an uninterrupted one. Index, free rows and clock are derived from the columns
whenever rows were written from outside. Decisions are made on the host, also where the rows are on a GPU:
their sizes depend on the ids, and to learn one from a GPU is to wait for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from cpr.shards.row_ids import CANDIDATE, ID, LAST_SEEN, SIGHTINGS, rows_of_ids
from dlrm.sharding.dynamic.columns import HostColumns, sent
from dlrm.sharding.dynamic.index import NOTHING, IdIndex, initial_values, mix

CANDIDATE_COLUMNS: Final = {CANDIDATE: torch.int64, SIGHTINGS: torch.int32}
"""Columns of a row that hold one place; its count is unrelated to the row itself."""
PLACE_BITS: Final = 32
"""Bits of the hash's upper half, used here; the index uses the lower half."""


class Candidates:
    """Counts of ids without a row, in the `CANDIDATE_COLUMNS` `[capacity]` of a table.

    Each id's count has one place, by its hash, shared with other ids; the id seen there last keeps it. So a
    count is never too high, and a rare id whose place was taken starts over. This is the ageing that
    admission by frequency needs, and nothing else has to expire.
    """

    def __init__(self, columns: HostColumns, changes: Callable[[Tensor], object]) -> None:
        self._columns, self._changes = columns, changes
        self._ids, self._counts = columns[CANDIDATE], columns[SIGHTINGS]

    def counts(self, ids: Tensor) -> Tensor:
        """How often each id was seen so far, int64 `[n]`."""
        places = self._places(ids)
        return torch.where(self._ids[places] == ids, self._counts[places].to(torch.int64), 0)

    def remember(self, ids: Tensor, counts: Tensor) -> None:
        """Set the counts of ids (ascending, unique); if several share a place, the one seen most keeps it."""
        places = self._places(ids)
        order = counts.argsort(descending=True, stable=True)
        order = order[places[order].argsort(stable=True)]
        places = places[order]
        first = torch.ones_like(places, dtype=torch.bool)
        first[1:] = places[1:] != places[:-1]
        best, places = order[first], places[first]
        self._changes(places)
        self._columns.write(CANDIDATE, places, ids[best])
        self._columns.write(SIGHTINGS, places, counts[best].clamp(max=torch.iinfo(torch.int32).max))

    def forget(self, ids: Tensor) -> None:
        """Drop the counts of ids that have got rows."""
        places = self._places(ids)
        places = places[self._ids[places] == ids]
        self._changes(places)
        self._columns.write(SIGHTINGS, places, 0)

    def _places(self, ids: Tensor) -> Tensor:
        upper = (mix(ids) >> PLACE_BITS) & ((1 << PLACE_BITS) - 1)
        return upper % self._ids.numel()


EVICTION_SHARE: Final = 16
"""An eviction frees at least 1/16 of all rows, because it rebuilds the index, which is slow."""


def columns_of_rows(admit_after: int) -> dict[str, torch.dtype]:
    """Columns that a dynamic table adds to its rows, with their dtypes."""
    columns = {ID: torch.int64, LAST_SEEN: torch.int32}
    return columns | CANDIDATE_COLUMNS if admit_after > 1 else columns


class DynamicTable:
    """The rows of a table, assigned to ids.

    An id gets a row in the training pass that sees it for the `admit_after`-th time, with initial values that
    depend on seed, table name and id alone. If no row is free, the least recently seen ids lose theirs with
    all that was learned, but never ids of the batch itself. If a batch has more new ids than rows, its most
    frequent ids get them.

    Ids and rows that are given and returned are on the host.

    Args:
        name: of the table.
        weights: live, float `[capacity, columns]`.
        state: of the optimizer, live, `[capacity, ...]` each; zeros for a new row.
        columns: `columns_of_rows`, live, `[capacity]` each.
        admit_after: number of sightings in training after which an id gets a row; 1: at once.
        seed: of the initial values.
        initial_range: lowest and highest initial value of a weight.
        changes: called with the rows whose weights, state or columns are about to change, int64 `[n]`.
        evictions: called with the rows whose ids are about to be evicted, int64 `[n]`.
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
        initial_range: tuple[float, float],
        changes: Callable[[Tensor], object] = lambda rows: None,
        evictions: Callable[[Tensor], object] = lambda rows: None,
    ) -> None:
        self.name = name
        self._weights, self._state = weights, list(state)
        self._columns = HostColumns(columns)
        self._ids, self._last_seen = self._columns[ID], self._columns[LAST_SEEN]  # 0 in free rows
        self._noted, self._evictions = changes, evictions
        self._candidates = Candidates(self._columns, self._changes) if admit_after > 1 else None
        self._admit_after, self._seed, self._initial_range = admit_after, seed, initial_range
        self._index: IdIndex | None = None
        self._free = self._ids.new_empty(0)
        self._clock = 0

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self._ids.numel()

    @property
    def num_ids(self) -> int:
        """Number of ids that have a row."""
        return int((self._last_seen > 0).sum())

    def invalidate_index(self) -> None:
        """Discard derived state, because rows were written from outside."""
        self._index = None

    def find(self, ids: Tensor) -> Tensor:
        """Row of each id, int64 `[n]`, or -1; changes nothing."""
        return self._current_index().find(ids)

    def train_on(self, ids: Tensor) -> Tensor:
        """Look up the row of each id of a training pass, and give rows to new ids seen often enough.

        Takes the ids `[n]` with the repetitions of the batch; returns int64 `[n]`, -1 where an id has no row.
        """
        index = self._current_index()
        self._clock += 1
        rows = index.find(ids)
        missing = rows == NOTHING
        known = rows[~missing]
        self._changes(known)
        self._columns.write(LAST_SEEN, known, self._clock)
        if not bool(missing.any()):
            return rows
        unknown, places, counts = torch.unique(ids[missing], return_inverse=True, return_counts=True)
        rows[missing] = self._admit(unknown, counts)[places]
        return rows

    def _admit(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Assign rows to unique ascending ids that were seen often enough, `counts` times in the batch."""
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
        """Initialize rows for new ids, writing `last_seen` last.

        A killed worker leaves no half-initialized row.
        """
        columns, device = self._weights.shape[1], self._weights.device
        values = initial_values(sent(ids, device), columns, self._initial_range, self._seed, self.name)
        self._changes(rows)
        live = sent(rows, device)
        self._weights[live] = values.to(self._weights.dtype)
        for state in self._state:
            state[live] = 0
        self._columns.write(ID, rows, ids)
        self._columns.write(LAST_SEEN, rows, self._clock)
        self._current_index().add(rows)

    def _make_room(self, wanted: int) -> int:
        """Evict ids if fewer rows are free than wanted.

        Returns:
            Number of available rows, at most as wanted; fewer if too many ids are in use by this pass.
        """
        num_free = self._free.numel()
        if num_free < wanted:
            num_idle = int((self._last_seen < self._clock).sum()) - num_free
            num = min(num_idle, max(wanted - num_free, self.capacity // EVICTION_SHARE))
            if num:
                oldest = self._last_seen.argsort(stable=True)  # free rows (0) come first
                evicted = oldest[num_free : num_free + num]
                self._evict(evicted)
                self._derive_index()
        return min(wanted, self._free.numel())

    def _evict(self, rows: Tensor) -> None:
        """Take rows back; they keep their ids until they get others, as tombstones for readers of saves."""
        self._changes(rows)
        self._evictions(sent(rows, self._weights.device))
        self._columns.write(LAST_SEEN, rows, 0)

    def _current_index(self) -> IdIndex:
        if self._index is None:
            self._columns.reload()
            self._clock = int(self._last_seen.max())
            self._free_duplicates()
            return self._derive_index()
        return self._index

    def _derive_index(self) -> IdIndex:
        used = self._last_seen > 0
        self._free = (~used).nonzero().squeeze(1)
        self._index = IdIndex(self._ids, used.nonzero().squeeze(1))
        return self._index

    def _free_duplicates(self) -> None:
        """Keep only the most recently seen row of each id.

        An id has several rows after rows were restored from different moments, between which the id moved.
        """
        is_older = self._last_seen > 0
        is_older[rows_of_ids(self._ids, self._last_seen)] = False
        self._evict(is_older.nonzero().squeeze(1))

    def _changes(self, rows: Tensor) -> None:
        self._noted(sent(rows, self._weights.device))
