"""The sketch keeps its error bound for any numbers in any order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm.metrics.sketch import QuantileSketch

numbers = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1.0, float(np.nextafter(np.float32(1), np.float32(2)))]),
    ),
    max_size=300,
)
capacities = st.sampled_from([2, 4, 8, 16, 64])


def sketch_of(values: np.ndarray, capacity: int, chunk: int) -> QuantileSketch:
    sketch = QuantileSketch(capacity)
    for start in range(0, len(values), chunk):
        sketch.insert(values[start : start + chunk])
    return sketch


def worst_shift(exact: np.ndarray, kept: np.ndarray, weights: np.ndarray) -> float:
    """Largest difference of the two distribution functions, from the left and from the right."""
    exact, points = np.sort(exact), np.unique(exact)
    below = np.concatenate([[0.0], np.cumsum(weights)])
    return max(
        float(
            np.abs(np.searchsorted(exact, points, side) - below[np.searchsorted(kept, points, side)]).max()
            / len(exact)
        )
        for side in ("left", "right")
    )


@given(values=numbers, capacity=capacities, chunk=st.integers(1, 50))
def test_no_point_of_the_distribution_shifts_by_more_than_the_bound(values, capacity, chunk):
    exact = np.array(values, np.float32)
    sketch = sketch_of(exact, capacity, chunk)
    kept, weights = sketch.weighted()
    assert weights.sum() == sketch.count == len(exact)
    assert (np.diff(kept) >= 0).all()
    if len(exact):
        assert worst_shift(exact, kept, weights) <= sketch.error_bound + 1e-12
        levels = math.log2(max(len(exact) / capacity, 1)) + 1
        assert sketch.error_bound <= (levels + 2) / (2 * capacity)


def odd_below(level: int, kept: int) -> list[int]:
    """Zeros in each of `2**level` chunks, such that keeping the odd ones always sees an odd number.

    `kept` zeros come out of the last collapse, so `2 * kept - 1` go in, which two lower ones have to give.
    """
    if level == 0:
        return [2 * kept - 1]
    return odd_below(level - 1, kept - 1) + odd_below(level - 1, kept)


def test_an_adversary_cannot_make_all_collapses_shift_the_same_way():
    capacity, levels = 64, 6
    zeros = odd_below(levels - 1, levels + 2)
    exact = np.array([[0.0] * number + [1.0] * (capacity - number) for number in zeros], np.float32).ravel()
    sketch = sketch_of(exact, capacity, chunk=capacity)
    one_way = sum(2**level * (len(zeros) >> level) for level in range(levels)) / len(exact)
    assert sketch.error_bound < 0.6 * one_way  # what always keeping the odd ones would give here
    assert worst_shift(exact, *sketch.weighted()) <= sketch.error_bound + 1e-12


@given(values=numbers, capacity=capacities, limit=st.integers(1, 400))
def test_points_of_equal_share_add_no_more_than_half_a_share(values, capacity, limit):
    exact = np.array(values, np.float32)
    sketch = sketch_of(exact, capacity, 50)
    points = sketch.points(limit)
    assert len(points) == min(limit, len(exact))
    if len(exact):
        share = np.full(len(points), len(exact) / len(points))
        extra = 0.5 / limit if len(exact) > limit else 0.0
        assert worst_shift(exact, points, share) <= sketch.error_bound + extra + 1e-9


def test_memory_grows_with_the_logarithm_of_the_count():
    sketch = QuantileSketch(64)
    sizes = []
    for _ in range(12):
        sketch.insert(np.random.default_rng(1).normal(size=max(sketch.count, 64)).astype(np.float32))
        sizes.append(len(sketch.weighted()[0]))
    assert sketch.count == 64 * 2**11
    assert max(sizes) <= 64 * (math.log2(sketch.count / 64) + 1)


@pytest.mark.parametrize("capacity", [0, 1, 7])
def test_a_capacity_that_cannot_be_halved_is_refused(capacity):
    with pytest.raises(ValueError, match="even number"):
        QuantileSketch(capacity)
