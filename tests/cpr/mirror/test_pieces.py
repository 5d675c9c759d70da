"""Rows travel as they are, and bytes that are no pieces are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.mirror.changed_rows import united
from cpr.mirror.pieces import ShardRows, read_pieces, unique_rows, write_piece

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


def column(dtype, *shape):
    return torch.randint(0, 100, shape).to(dtype)


@given(dtypes=st.lists(DTYPES, min_size=2, max_size=3), cols=st.integers(1, 9), data=st.data())
def test_rows_arrive_as_they_are(dtypes, cols, data):
    first, *others = dtypes
    source = {"weights": column(first, 7, 2 * cols)[:, :cols]}  # not contiguous
    source |= {f"state{number}": column(each, 7) for number, each in enumerate(others)}
    target = {name: torch.zeros_like(each).contiguous() for name, each in source.items()}
    chosen = data.draw(
        st.one_of(
            st.builds(slice, st.integers(0, 3), st.integers(3, 7)),
            st.lists(st.integers(0, 6), unique=True, max_size=7).map(sorted).map(torch.tensor),
        )
    )
    rows = chosen.to(torch.int64) if isinstance(chosen, torch.Tensor) else chosen
    live, kept = ShardRows(source), ShardRows(target)
    count = rows.numel() if isinstance(rows, torch.Tensor) else rows.stop - rows.start
    buffer = torch.zeros(live.piece_bytes(count, listed=isinstance(rows, torch.Tensor)), dtype=torch.uint8)
    assert write_piece(buffer, 0, live, rows) == buffer.numel()
    (piece,) = read_pieces(buffer, [kept])
    kept.write(piece)
    others = torch.ones(7, dtype=torch.bool)
    others[rows] = False
    for name, each in target.items():
        assert torch.equal(each[rows], source[name][rows])
        assert not each[others].any()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 1, "no shard 1"),
        (1, 9, "instead of"),
        (1, -3, "instead of"),
        (3, 8, "instead of"),
        (4, 9, "valid Form"),
        (5, 7, "outside"),
    ],
)
def test_bytes_that_are_no_pieces_are_refused(place, value, says):
    rows = ShardRows({"weights": column(torch.float32, 7, 2)})
    buffer = torch.zeros(rows.piece_bytes(2, listed=True), dtype=torch.uint8)
    write_piece(buffer, 0, rows, torch.tensor([1, 3]))
    buffer.view(torch.int64)[place] = value
    with pytest.raises(ValueError, match=says):
        list(read_pieces(buffer, [rows]))
    with pytest.raises(ValueError, match="fewer than a header"):
        list(read_pieces(buffer[:16], [rows]))


ROWS = st.one_of(st.integers(0, 20), st.integers(2**31 - 2, 2**31 + 2))


@given(st.lists(st.lists(ROWS, max_size=9), min_size=1, max_size=4))
def test_rows_are_listed_once(lists):
    found = unique_rows([torch.tensor(each, dtype=torch.int64) for each in lists])
    assert found.tolist() == sorted({row for each in lists for row in each})


def test_rows_of_several_passes_are_united_by_shard():
    passes = [{0: torch.tensor([1, 4]), 2: torch.tensor([0])}, {}, {0: torch.tensor([0, 4])}]
    found = {shard: rows.tolist() for shard, rows in united(*passes).items()}
    assert found == {0: [0, 1, 4], 2: [0]}
