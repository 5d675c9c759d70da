"""Tables and columns of split heads are distributed evenly."""

from hypothesis import given
from hypothesis import strategies as st

from dlrm.sharding.splitting.layout import balanced, even_columns


@given(st.integers(1, 64), st.integers(1, 9))
def test_columns_are_distributed_evenly_in_pieces_of_four(steps, num_ranks):
    columns = even_columns(4 * steps, num_ranks)
    assert len(columns) == num_ranks
    assert sum(columns) == 4 * steps
    assert all(each % 4 == 0 for each in columns)
    assert max(columns) - min(columns) <= 4
    assert columns == sorted(columns, reverse=True)


def test_the_largest_tables_go_first_and_apart():
    assert balanced([10, 1, 9, 2], [0.1] * 4, 2) == [0, 0, 1, 1]


def test_lookups_count_as_much_as_bytes():
    # one table has all the bytes, another one all the ids
    assert len(set(balanced([1000, 1, 1, 1], [1, 1000, 1, 1], 2)[:2])) == 2


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 20)), min_size=1, max_size=30), st.integers(1, 8)
)
def test_every_rank_has_a_table_and_none_more_than_a_table_above_the_least(tables, num_ranks):
    num_bytes, lookups = zip(*tables, strict=True)
    ranks = balanced(num_bytes, lookups, num_ranks)
    assert len(set(ranks)) == min(num_ranks, len(tables))
    loads = [a / sum(num_bytes) + b / sum(lookups) for a, b in tables]
    of_rank = [
        sum(load for load, owner in zip(loads, ranks, strict=True) if owner == rank)
        for rank in range(num_ranks)
    ]
    assert max(of_rank) - min(of_rank) <= max(loads) + 1e-9
