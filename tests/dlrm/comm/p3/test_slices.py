"""Slices cover the gradient once, are neither too large nor needlessly small, and go as P3's queue would."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.p3.slices import issue_order, lay_out

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def test_large_tensors_are_cut_evenly():
    _, slices = lay_out({"weight": 120_000})
    assert [each.end - each.begin for each in slices] == [40_000] * 3
    assert slices[1].name == "weight[40000:80000]"


@given(sizes=SIZES, slice_values=st.integers(40, 200), fuse_values=st.integers(0, 20))
def test_every_value_lies_in_one_slice(sizes, slice_values, fuse_values):
    places, slices = lay_out(
        {f"p{index}": size for index, size in enumerate(sizes)}, slice_values, fuse_values
    )
    bounds = [(each.begin, each.end) for each in slices]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == sum(sizes)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert all(0 < end - begin <= slice_values for begin, end in bounds)
    in_order = sorted((place.start, place.stop) for place in places)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(in_order))
    for index, (size, place) in enumerate(zip(sizes, places, strict=True)):
        assert place.stop - place.start == size
        for each in slices:
            assert (index in each.parameters) == (each.begin < place.stop and place.start < each.end)


@pytest.mark.parametrize(
    ("sizes", "fuse_values", "names"),
    [
        ({"w0": 90, "b0": 4, "w1": 90, "b1": 4}, 10, ["w0", "b0, b1", "w1"]),
        ({"a": 6, "b": 6, "c": 6}, 10, ["a, b", "c"]),
        ({"a": 1, "b": 1}, 0, ["a", "b"]),
    ],
)
def test_small_tensors_share_slices(sizes, fuse_values, names):
    assert [each.name for each in lay_out(sizes, 100, fuse_values)[1]] == names


def test_slices_too_small_for_fused_tensors_are_refused():
    with pytest.raises(ValueError, match="make slice_values at least twice fuse_values"):
        lay_out({"a": 1}, slice_values=10, fuse_values=8)


@pytest.mark.parametrize(
    ("takes_s", "order"),
    [
        (2.5, [3, 1, 0, 2]),  # the first layer is needed first, once it is ready
        (0.1, [3, 2, 1, 0]),  # on a fast link, as slices become ready
        (100.0, [3, 0, 1, 2]),  # on a slow link, as slices are needed
    ],
)
def test_slices_that_are_needed_first_overtake_others(takes_s, order):
    assert issue_order([4.0, 3.0, 2.0, 1.0], [0, 1, 2, 3], [takes_s] * 4) == order


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5), st.floats(0.001, 3)), min_size=1, max_size=20))
def test_no_slice_waits_behind_one_that_is_needed_later(slices):
    ready_s, needed, takes_s = zip(*slices, strict=True)
    order = issue_order(ready_s, needed, takes_s)
    assert sorted(order) == list(range(len(slices)))
    now_s = 0.0
    for position, index in enumerate(order):
        waiting = order[position:]
        now_s = max(now_s, min(ready_s[each] for each in waiting))
        assert ready_s[index] <= now_s, "the link was idle though something was ready"
        assert needed[index] == min(needed[each] for each in waiting if ready_s[each] <= now_s)
        now_s += takes_s[index]
