"""The rows with the highest numbers."""

import torch
from torch import Tensor


def top_rows(values: Tensor, budget: int) -> Tensor:
    """The at most `budget` rows with the highest positive values, ascending, in O(N); of equals, the lowest.

    Args:
        values: `[num_rows]`; rows at 0 have nothing to save and are never among them.
        budget: at least 1.

    Returns:
        int64 `[n]` with `n <= budget`, on the device of `values`.
    """
    rows = torch.nonzero(values > 0).view(-1)
    num = rows.numel()
    if num <= budget:
        return rows
    found = values[rows]
    threshold = found.kthvalue(num - budget + 1).values
    is_above = found > threshold
    at_threshold = torch.nonzero(found == threshold).view(-1)
    is_above[at_threshold[: budget - int(is_above.sum())]] = True
    return rows[is_above]
