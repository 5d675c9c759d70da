"""Row numbers as runs: the same as a sorted list of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.loader.row_set import RowSet

NOTHING = np.empty(0, np.int64)


def listed(rows):
    return rows.part(0, len(rows)).tolist()


def as_rows(numbers):
    return np.array(sorted(numbers), np.int64)


@given(kept=st.sets(st.integers(0, 60)), cuts=st.lists(st.integers(0, 61), min_size=2, max_size=6))
def test_parts_and_subsets_are_those_of_a_sorted_list(kept, cuts):
    everything = RowSet.span(0, 61)
    rows = everything.only([], also=np.random.default_rng(0).permutation(as_rows(kept)))
    expected = sorted(kept)
    assert listed(rows) == expected
    assert len(rows) == len(expected)
    cuts = sorted(min(cut, len(expected)) for cut in cuts)
    for begin in cuts:
        for end in cuts:
            part = rows.part(begin, end)
            assert part.dtype == np.int64
            assert part.tolist() == expected[begin:end]
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    chosen = {row for begin, end in pairs for row in expected[begin:end]}
    others = set(range(61)) - kept
    assert listed(rows.only(pairs, also=as_rows(others))) == sorted(chosen | others)


def test_neighbours_become_one_run_so_that_billions_of_rows_take_no_memory():
    rows = RowSet.span(5, 10**12)
    rest = rows.only([(100, len(rows)), (0, 40)], also=np.arange(45, 105)[::-1])
    assert listed(rest.only([(0, 3)], also=NOTHING)) == [5, 6, 7]
    assert len(rest._starts) == 1
    assert rest.part(10**11, 10**11 + 2).tolist() == [10**11 + 5, 10**11 + 6]


def test_empty_set():
    nothing = RowSet.span(0, 0)
    for rows in (nothing, nothing.only([], also=NOTHING), nothing.only([(0, 0)], also=NOTHING)):
        assert len(rows) == 0
        assert rows.part(0, 0).tolist() == []
