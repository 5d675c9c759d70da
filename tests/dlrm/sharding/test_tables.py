"""Initial values depend on seed, table and position, not on the plan."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.shards import TableShard, find_shards
from dlrm.sharding import tables
from dlrm.sharding.tables import INIT_CHUNK_ROWS, _fills, draw_uniform

DIM = 8


def filled(rows, dim, first_row=0, first_column=0, shape=None, name="cat_0", seed=1, low=-0.5, high=0.25):
    shard = torch.full(shape or (rows, dim), torch.nan)
    table = TableShard(
        table_fqn=f"model.{name}",
        table_shape=(rows, dim),
        row_offset=first_row,
        col_offset=first_column,
        replicated=False,
        weights=shard,
        optimizer_state={},
    )
    for fill in _fills(table, low, high, seed):
        fill()
    return shard


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 50), chunk=st.integers(1, 20))
def test_a_piece_has_the_initial_values_of_the_whole_table(data, rows, chunk):
    low = data.draw(st.integers(0, rows - 1))
    high = data.draw(st.integers(low + 1, rows))
    left = data.draw(st.integers(0, DIM - 1))
    right = data.draw(st.integers(left + 1, DIM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "INIT_CHUNK_ROWS", chunk)
        whole = filled(rows, DIM)
        piece = filled(rows, DIM, low, left, (high - low, right - left))
    assert torch.equal(piece, whole[low:high, left:right])


def test_large_tables_are_filled_to_the_last_row():
    rows = INIT_CHUNK_ROWS + 3
    whole = filled(rows, 4)
    assert -0.5 <= whole.min() < whole.max() <= 0.25
    assert whole.mean().item() == pytest.approx(-0.125, abs=0.002)
    assert whole.std().item() == pytest.approx(0.75 / 12**0.5, rel=0.01)
    assert whole[-3:].unique().numel() == 12
    assert not torch.equal(whole[-3:], whole[:3])


def test_drawn_values_are_uniform_and_independent():
    values = np.empty(3 * tables.DRAWN_AT_ONCE + 5, dtype=np.float32)
    draw_uniform(values, -2.0, 6.0, seed=5)
    assert -2 <= values.min() < -1.999 < 5.999 < values.max() <= 6
    counts, _ = np.histogram(values, bins=64, range=(-2, 6))
    expected = len(values) / 64
    assert 20 < ((counts - expected) ** 2 / expected).sum() < 130, "chi-squared with 63 degrees of freedom"
    for lag in (1, 2, 64, tables.DRAWN_AT_ONCE):
        assert abs(np.corrcoef(values[lag:], values[:-lag])[0, 1]) < 0.01
    again = np.empty_like(values[:7])
    draw_uniform(again, -2.0, 6.0, seed=5)
    assert np.array_equal(again, values[:7])
    draw_uniform(again, -2.0, 6.0, seed=6)
    assert not np.array_equal(again, values[:7])


def test_initial_values_depend_on_seed_and_name():
    first = filled(10, 4)
    assert torch.equal(first, filled(10, 4))
    assert not torch.equal(first, filled(10, 4, seed=2))
    assert not torch.equal(first, filled(10, 4, name="cat_1"))


def test_a_models_tables_depend_neither_on_the_plan_nor_on_the_global_generator(shard_model, whole_tables):
    kinds = {"cat_0": "data_parallel", "cat_1": "table_wise", "cat_2": "column_wise", "cat_3": "column_wise"}
    torch.manual_seed(1)
    cut = shard_model(kinds)
    torch.manual_seed(2)
    plain = shard_model(dict.fromkeys(kinds, "table_wise"))
    pieces = [found.table_fqn.rpartition(".")[2] for found in find_shards(cut)]
    assert sorted(pieces) == ["cat_0", "cat_1", "cat_2", "cat_2", "cat_3", "cat_3"]
    wanted = whole_tables(plain)
    for name, values in whole_tables(cut).items():
        assert torch.equal(values, wanted[name]), name
