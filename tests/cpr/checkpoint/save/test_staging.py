"""The staging pool is the memory ceiling, and gives out aligned room for columns."""

import threading

import pytest
import torch

from cpr.checkpoint.save.staging import ALIGNMENT, PIECE_BYTES, StagingPool, place_columns, rows_per_piece


def test_the_pool_never_holds_more_than_its_ceiling():
    pool = StagingPool(3 * PIECE_BYTES + 5)
    buffers = [pool.acquire() for _ in range(3)]
    assert pool.acquire() is None
    assert pool.acquire(timeout_s=0.01) is None
    assert pool._num_made == 3
    pool.release(buffers[0])
    assert pool.acquire() is buffers[0]
    assert pool._num_made == 3


def test_waiting_ends_when_a_buffer_comes_back():
    pool = StagingPool(2 * PIECE_BYTES)
    first, _ = pool.acquire(), pool.acquire()
    timer = threading.Timer(0.05, pool.release, [first])
    timer.start()
    assert pool.acquire(timeout_s=30) is first
    timer.join()


def test_warming_up_makes_no_more_than_is_needed():
    pool = StagingPool(10 * PIECE_BYTES)
    pool.warm_up(PIECE_BYTES + 1)
    assert pool._num_made == 2
    pool.warm_up(100 * PIECE_BYTES)
    assert pool._num_made == 10


def test_columns_lie_aligned_and_apart():
    columns = {"weights": torch.empty(9, 5), "sum": torch.empty(9), "half": torch.empty(9, 3).half()}
    buffer = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    placed = place_columns(buffer, columns, 7)
    for number, (name, column) in enumerate(placed.items(), 1):
        assert column.shape == (7, *columns[name].shape[1:])
        assert column.dtype == columns[name].dtype
        assert (column.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
        column.fill_(number)
    assert [column.unique().tolist() for column in placed.values()] == [[1.0], [2.0], [3.0]]


def test_as_many_rows_as_fit_do_fit():
    columns = {"weights": torch.empty(1, 64), "sum": torch.empty(1)}
    rows = rows_per_piece(columns)
    place_columns(torch.empty(PIECE_BYTES, dtype=torch.uint8), columns, rows)
    assert rows * (64 + 1) * 4 > 0.99 * PIECE_BYTES


def test_a_row_larger_than_a_buffer_is_refused():
    with pytest.raises(ValueError, match="a row takes"):
        rows_per_piece({"weights": torch.empty(1, PIECE_BYTES // 4 + 1)})
