"""Counts how often ids without a row were seen.

Each id's count has one place, by its hash, shared with other ids; the id seen there last keeps it. So a count
is never too high, and a rare id whose place was taken starts over. This is the ageing that admission by
frequency needs, and nothing else has to expire.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from dlrm.sharding.dynamic.hashing import mix

COLUMNS: Final = {"candidate": torch.int64, "sightings": torch.int32}
"""Columns of a row that hold one place; its count is unrelated to the row itself."""
PLACE_BITS: Final = 32
"""Bits of the hash's upper half, used here; the index uses the lower half."""


class Candidates:
    """Counts of ids without a row, in the live `COLUMNS` `[capacity]` of a table."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._ids, self._counts = columns["candidate"], columns["sightings"]

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
        self._ids[places] = ids[best]
        self._counts[places] = counts[best].clamp(max=torch.iinfo(torch.int32).max).to(torch.int32)

    def forget(self, ids: Tensor) -> None:
        """Drop the counts of ids that have got rows."""
        places = self._places(ids)
        self._counts[places[self._ids[places] == ids]] = 0

    def _places(self, ids: Tensor) -> Tensor:
        upper = (mix(ids) >> PLACE_BITS) & ((1 << PLACE_BITS) - 1)
        return upper % self._ids.numel()
