"""The largest counts that there can be; `test_row_trackers` compares `top_rows` with sorting."""

import torch

from cpr.priority.tracker import top_rows


def test_top_rows_of_the_largest_counts():
    values = torch.tensor([2**31 - 1, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    assert top_rows(values, 2).tolist() == [0, 3]
