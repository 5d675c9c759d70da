"""Which rows are sent, and when they are fewer bytes; for sums over ranks, see tests/system/comm."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.row_sparse import (
    RowSums,
    _tall_tables,
    bytes_by_rows,
    bytes_dense,
    send_touched_rows,
    touched_rows,
)


def test_touched_rows_have_a_value_that_is_not_zero():
    gradient = torch.zeros(6, 3)
    gradient[1, 2], gradient[3, 0], gradient[4, 1], gradient[5, 0] = 1.0, float("nan"), -0.0, 1e-45
    assert touched_rows(gradient).tolist() == [1, 3, 5]
    assert touched_rows(torch.zeros(4, 2)).tolist() == []


def test_rows_are_fewer_bytes_until_all_ranks_touch_their_share():
    """Of 1000 rows of 16, 2 ranks may touch 1000 * 16 / 17 each, and 8 ranks a quarter of that."""
    for num_ranks, most in ((2, 941), (8, 235)):
        dense = bytes_dense(1000 * 16, num_ranks)
        for busiest, fewer in ((most, True), (most + 1, False)):
            counts = [busiest, *[0] * (num_ranks - 1)]
            assert (bytes_by_rows(counts, 16) < dense) == fewer, (num_ranks, busiest)


def test_neighbours_of_one_width_are_one_tall_table():
    flat = torch.arange(3 * 4 + 2 * 4 + 5 * 8 + 1 * 4.0)
    tall = _tall_tables(flat, [(3, 4), (2, 4), (5, 8), (1, 4)])
    assert [tuple(table.shape) for table in tall] == [(5, 4), (5, 8), (1, 4)]
    assert torch.equal(torch.cat([table.view(-1) for table in tall]), flat)
    tall[1].zero_()
    assert flat.count_nonzero() == flat.numel() - 40 - 1  # they are views; one value was 0 before


def test_gradients_of_a_single_rank_are_unchanged(world_of_one):
    gradient = torch.randn(3, 2)
    before = gradient.clone()
    RowSums().sum_([gradient])
    assert torch.equal(gradient, before)
    module = DistributedDataParallel(nn.EmbeddingBag(5, 2, mode="sum"))
    send_touched_rows(module, {module.module.weight: [(5, 2)]})
    module(torch.tensor([[1, 1], [3, 1]])).sum().backward()
    assert module.module.weight.grad.tolist() == [[0, 0], [3, 3], [0, 0], [1, 1], [0, 0]]


def test_tables_that_do_not_fill_their_parameter_are_refused(world_of_one):
    for table, shapes in ((nn.Embedding(5, 2), [(4, 2)]), (nn.Embedding(5, 2).half(), [(5, 2)])):
        module = DistributedDataParallel(table)
        with pytest.raises(ValueError, match="name all of its tables, or leave it out"):
            send_touched_rows(module, {table.weight: shapes})
