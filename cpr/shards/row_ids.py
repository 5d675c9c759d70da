"""Columns by which the rows of a dynamic table hold ids, and which row holds an id.

A dynamic table assigns its rows to 64-bit ids as they appear, and takes them back when it evicts an id. Who
reads its rows from a checkpoint needs these columns, and this rule, to look rows up by id.
"""

from collections.abc import Collection
from typing import Final

import torch
from torch import Tensor

ID: Final = "id"
"""Column with the id of a row, int64. A row that was evicted keeps the evicted id until it gets another."""
LAST_SEEN: Final = "last_seen"
"""Column with the training pass that saw the id last, int32; 0: the row holds no id."""
CANDIDATE: Final = "candidate"
"""Column with an id that waits for a row, int64; unrelated to the id of the row that stores it."""
SIGHTINGS: Final = "sightings"
"""Column with the number of times that the candidate was seen, int32."""


def is_dynamic(columns: Collection[str]) -> bool:
    """Whether a table with columns of these names is a dynamic one."""
    return ID in columns and LAST_SEEN in columns


def rows_of_ids(ids: Tensor, last_seen: Tensor) -> Tensor:
    """Row of each id of a table, int64 `[num_ids]`, in the order of the ids.

    Rows that were saved at different steps may hold the same id, if it has moved in between: of these, the
    row seen last holds it, and of rows seen in the same pass the first.

    Args:
        ids: column `id`, int64 `[num_rows]`.
        last_seen: column `last_seen`, `[num_rows]`.
    """
    used = (last_seen > 0).nonzero().squeeze(1)
    used = used[last_seen[used].argsort(descending=True, stable=True)]
    used = used[ids[used].argsort(stable=True)]
    is_first = torch.ones_like(used, dtype=torch.bool)
    is_first[1:] = ids[used][1:] != ids[used][:-1]
    return used[is_first]
