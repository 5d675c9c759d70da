"""How often ids were seen that have no row yet.

Each id has one place for its count, by its hash, and shares it with others: whoever was seen there last is
remembered. So a count is never too high, and an id that comes so rarely that others took its place meanwhile
begins again. That is the ageing that admission by frequency needs, and why nothing else has to be forgotten.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from dlrm.sharding.dynamic.hashing import mix

COLUMNS: Final = {"candidate": torch.int64, "sightings": torch.int32}
"""Of a row, which has one of the places; what is counted there has nothing else to do with the row."""
PLACE_BITS: Final = 32
"""The upper half of the hash; the index uses the lower."""


class Candidates:
    """Counts of ids without a row.

    Args:
        columns: `COLUMNS`, live, `[capacity]` each.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._ids, self._counts = columns["candidate"], columns["sightings"]

    def counts(self, ids: Tensor) -> Tensor:
        """Sightings of each id so far, int64 `[n]`."""
        places = self._places(ids)
        return torch.where(self._ids[places] == ids, self._counts[places].to(torch.int64), 0)

    def remember(self, ids: Tensor, counts: Tensor) -> None:
        """Set the counts of these ids; of several for one place, the one seen most (then the smallest) stays.

        Args:
            ids: int64 `[n]`, ascending, without duplicates.
            counts: int64 `[n]`, positive.
        """
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
        """These ids have rows now."""
        places = self._places(ids)
        self._counts[places[self._ids[places] == ids]] = 0

    def _places(self, ids: Tensor) -> Tensor:
        upper = (mix(ids) >> PLACE_BITS) & ((1 << PLACE_BITS) - 1)
        return upper % self._ids.numel()
