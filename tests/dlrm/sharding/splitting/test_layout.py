"""Where the tables of a split head may lie, and messages for other layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata

from data.dataset import Feature
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import LinearHead
from dlrm.sharding.splitting.layout import balanced, columns_by_rank, even_columns

ROWS = 10
FEATURES = [Feature(name=name, rows=ROWS) for name in "ab"]
DOT = DotHead(FEATURES, 16, torch.float32)
LINEAR = LinearHead(FEATURES)


def lay(kind, *pieces):
    """A table in pieces `(rank, first row, first column, rows, columns)`."""
    shards = [
        ShardMetadata(shard_offsets=[row, column], shard_sizes=[rows, columns], placement=f"rank:{rank}/cpu")
        for rank, row, column, rows, columns in pieces
    ]
    return ParameterSharding(
        sharding_type=kind,
        compute_kernel="fused",
        ranks=[rank for rank, *_ in pieces],
        sharding_spec=EnumerableShardingSpec(shards),
    )


def columns(*pieces):
    """A table in pieces `(rank, columns)`."""
    placed, first = [], 0
    for rank, width in pieces:
        placed.append((rank, 0, first, ROWS, width))
        first += width
    return lay("column_wise", *placed)


def table(rank):
    return lay("table_wise", (rank, 0, 0, ROWS, 4))


def rows(*counts):
    return lay("row_wise", *((rank, rank * counts[0], 0, count, 4) for rank, count in enumerate(counts)))


@pytest.mark.parametrize(
    ("head", "plan", "expected"),
    [
        (DOT, {"a": columns((0, 4), (1, 12)), "b": columns((0, 4), (1, 12))}, [4, 12, 0]),
        (DOT, {"a": columns((0, 8), (2, 8)), "b": columns((0, 8), (2, 8))}, [8, 0, 8]),
        (LINEAR, {"a": table(2), "b": table(0)}, [4, 0, 4]),
        (LINEAR, {"a": rows(4, 4, 2), "b": rows(4, 4, 2)}, [4, 4, 4]),
    ],
)
def test_columns_of_each_rank(head, plan, expected):
    assert columns_by_rank(head, plan, 3) == expected


@pytest.mark.parametrize(
    ("head", "plan", "message"),
    [
        (LINEAR, {"a": table(0)}, "tables all table_wise or all row_wise, not missing and table_wise; or"),
        (LINEAR, {"a": table(0), "b": rows(5, 5)}, "not row_wise and table_wise; or plan its `tables`"),
        (DOT, {"a": table(0), "b": table(1)}, "with its tables all column_wise, not table_wise"),
        (DOT, {"a": columns((0, 8), (1, 8)), "b": columns((0, 16))}, "not 16 on rank 0; 8 on rank 0, 8 on"),
        (DOT, dict.fromkeys("ab", columns((1, 8), (0, 8))), "in the order of ranks, .* not 8 on rank 1, 8"),
        (DOT, dict.fromkeys("ab", columns((0, 8), (0, 8))), "in one piece, .* not 8 on rank 0, 8 on rank 0"),
        (DOT, dict.fromkeys("ab", columns((0, 6), (1, 10))), "a multiple of 4 of them .* not 6 on rank 0"),
        (DOT, dict.fromkeys("ab", columns((0, 16), (1, 0))), "16 on rank 0, 0 on rank 1.* fewer ranks"),
    ],
)
def test_other_layouts_are_refused(head, plan, message):
    with pytest.raises(ValueError, match=message):
        columns_by_rank(head, plan, 2)


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
