"""Overlaps of extents agree with sets of cells."""

from hypothesis import given
from hypothesis import strategies as st

from cpr.extent import Extent, common, contains

SHAPE = (6, 5)
intervals = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda ends: (min(ends), max(ends)))


def ranges(size):
    """Non-empty half-open intervals within `size`."""
    return st.integers(0, size - 1).flatmap(
        lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, size))
    )


extents = st.builds(
    lambda table, rows, cols: Extent.of_table(table, SHAPE).narrowed(rows, cols),
    st.sampled_from(["a", "b"]),
    ranges(SHAPE[0]),
    ranges(SHAPE[1]),
)


def cells(extent):
    return {(extent.table_fqn, row, col) for row in range(*extent.rows) for col in range(*extent.cols)}


@given(intervals, intervals)
def test_intervals_agree_with_ranges(one, other):
    both = set(range(*one)) & set(range(*other))
    assert set(range(*(common(one, other) or (0, 0)))) == both
    if contains(one, other):
        assert both == set(range(*other))


@given(extents, extents)
def test_overlap_is_the_intersection_of_cells(one, other):
    overlap = one.overlap(other)
    assert (cells(overlap) if overlap else set()) == cells(one) & cells(other)
    assert overlap == other.overlap(one)
    if overlap:
        assert contains(one.rows, overlap.rows)
        assert contains(one.cols, overlap.cols)
        assert overlap.table_shape == SHAPE
