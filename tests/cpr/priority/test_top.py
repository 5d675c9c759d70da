"""`top_rows` agrees with sorting."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.priority.tracker import top_rows


def by_sorting(values, budget):
    ranked = sorted((-value, row) for row, value in enumerate(values) if value > 0)
    return sorted(row for _, row in ranked[:budget])


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 45))
def test_top_rows_of_counts_with_ties(values, budget):
    found = top_rows(torch.tensor(values, dtype=torch.int32), budget)
    assert found.dtype == torch.int64
    assert found.tolist() == by_sorting(values, budget)


def test_top_rows_of_the_largest_counts():
    values = torch.tensor([2**31 - 1, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    assert top_rows(values, 2).tolist() == [0, 3]
