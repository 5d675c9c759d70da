"""State as JSON with tensors beside it comes back as it was."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint.interop.json_tree import flat_name, from_notes, to_notes
from cpr.errors import CorruptFileError

KEYS = st.sampled_from(["a", "b", "a.b", "$tensor", "$items", ""]) | st.integers(-2, 2)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 9), max_size=3).map(torch.tensor),
    st.sampled_from(["u4", ">i2", "f8", "?"]).map(lambda dtype: np.ones((2, 1), dtype)),
    st.sampled_from(["f4", ">f4"]).map(lambda dtype: np.array(2, dtype)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def comparable(tree):
    """The same for equal trees only: types, order of keys, data types and values."""
    if isinstance(tree, dict):
        return ("dict", [(type(key), key, comparable(value)) for key, value in tree.items()])
    if isinstance(tree, list | tuple):
        return (type(tree), [comparable(value) for value in tree])
    if isinstance(tree, torch.Tensor | np.ndarray):
        return (type(tree), str(tree.dtype), tree.shape, tree.tolist())
    return (type(tree), tree)


@given(TREES)
def test_any_state_comes_back(tree):
    tensors = {}
    notes = json.loads(json.dumps(to_notes(tree, ("top",), tensors), allow_nan=False))
    by_name = {flat_name(path): tensor for path, tensor in tensors.items()}
    assert len(by_name) == len(tensors)
    assert comparable(from_notes(notes, by_name)) == comparable(tree)


def test_numbers_that_json_lacks_come_back():
    notes = json.dumps(to_notes({"best": float("-inf"), "last": [float("nan")]}, (), {}), allow_nan=False)
    back = from_notes(json.loads(notes), {})
    assert back["best"] == float("-inf")
    assert math.isnan(back["last"][0])


def test_a_tensor_that_is_not_there_is_named():
    with pytest.raises(CorruptFileError, match=r"top\.x"):
        from_notes(to_notes({"x": torch.ones(1)}, ("top",), {}), {})
