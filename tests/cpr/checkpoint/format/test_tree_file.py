"""State files: any tree round-trips, and damaged or unsupported ones are refused."""

import io
import json
import math
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from cpr.checkpoint.format.tree_file import read_state, write_state
from cpr.errors import CorruptFileError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]
NUMPY_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


def written(tree):
    sink = io.BytesIO()
    write_state(sink, tree)
    return sink.getvalue()


def round_trip(tree):
    return read_state(memoryview(written(tree)))


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    count = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        content = bytes(byte % 2 for byte in content)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
    return tensor.transpose(0, 1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
TREES = st.recursive(
    PLAIN | tensors() | hnp.arrays(NUMPY_DTYPES, SHAPES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def bits(value):
    """Something that is equal for the same types, shapes and bits only."""
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj().resolve_neg()
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", value.dtype, tuple(value.shape), content)
    if isinstance(value, np.ndarray):
        return ("ndarray", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", [(type(key), key, bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    return (type(value), repr(value))


@settings(max_examples=100)
@given(tree=TREES)
def test_any_tree_round_trips(tree):
    assert bits(round_trip(tree)) == bits(tree)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**200, -(2**64), "\ud800", {"\ud800": b"x"}]
)
def test_special_numbers_and_texts_round_trip(value):
    assert bits(round_trip(value)) == bits(value)


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (torch.Size([2, 3]), (2, 3)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.ones(2, dtype=torch.complex64).mul(1j).conj(), torch.tensor([complex(0.0, -1.0)] * 2)),
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
        (torch.ones(1).expand(3), torch.ones(3)),
        (np.asfortranarray([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]])),
    ],
)
def test_values_that_come_back_in_a_plainer_form(value, back):
    assert bits(round_trip(value)) == bits(back)


def test_read_tensors_own_their_memory():
    data = bytearray(written([torch.ones(3), np.ones(3)]))
    tensor, array = read_state(memoryview(data))
    data[:] = bytes(len(data))
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [2.0] * 3


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Custom(), r"a\.0\.7\.b cannot be saved: it is a .*Custom; use plain dict"),
        ({1}, r"a\.0\.7\.b cannot be saved: it is a builtins.set"),
        (np.float64(1.0), r"a\.0\.7\.b cannot be saved: it is a numpy.float64"),
        (np.array(["x"]), r"a\.0\.7\.b cannot be saved: it is a numpy array of dtype <U1; use numbers"),
        (np.array([None]), r"a\.0\.7\.b cannot be saved: it is a numpy array of dtype object"),
        (torch.eye(2).to_sparse(), r"a\.0\.7\.b cannot be saved: .*torch.sparse_coo"),
        (torch.ones(2, device="meta"), r"a\.0\.7\.b cannot be saved: .*meta"),
        ({1.5: 0}, r"a\.0\.7\.b cannot be saved: it has the key 1\.5; use str or int"),
        ({True: 0}, r"a\.0\.7\.b cannot be saved: it has the key True"),
    ],
)
def test_unsupported_values_are_refused_with_their_path(value, message):
    sink = io.BytesIO()
    with pytest.raises(ValueError, match=message):
        write_state(sink, {"a": [({"b": 1}), {7: {"b": value}}][1:]})
    assert not sink.getvalue()


def test_a_tree_that_contains_itself_is_refused():
    tree = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(ValueError, match=r"a\.0 cannot be saved: it contains itself"):
        written(tree)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_readable_without_this_project():
    tree = {"lr": 0.5, "weights": {3: torch.tensor([[1.5, 2.5]])}, "seed": (b"xyz", math.nan)}
    with pa.ipc.open_file(pa.py_buffer(written(tree))) as reader:
        rows = reader.read_all().to_pylist()
        metadata = reader.schema.metadata
    assert metadata[b"format"] == b"cpr-state"
    assert json.loads(metadata[b"tree"]) == {
        "dict": [
            ["lr", 0.5],
            ["weights", {"dict": [[3, {"tensor": 0}]]}],
            ["seed", {"tuple": [{"bytes": 1}, {"float": "nan"}]}],
        ]
    }
    assert [(row["name"], row["dtype"], row["shape"]) for row in rows] == [
        ("weights.3", "float32", [1, 2]),
        ("seed.0", "bytes", [3]),
    ]
    assert np.frombuffer(rows[0]["data"], "<f4").tolist() == [1.5, 2.5]
    assert rows[1]["data"] == b"xyz"


SAMPLE = {"a": [torch.arange(20.0), (1, b"bytes", math.inf)], 2: np.arange(3), "c": {"d": torch.tensor(True)}}


@settings(max_examples=60)
@given(data=st.data())
def test_a_truncated_file_is_corrupt(data):
    whole = written(SAMPLE)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptFileError, match="damaged"):
        read_state(memoryview(whole[:length]))
    with pytest.raises(CorruptFileError, match="damaged or no state file"):
        read_state(memoryview(b"not an Arrow file at all, but long enough to hold one's magic"))


@settings(max_examples=400)
@given(data=st.data())
def test_flipped_bits_are_corrupt_or_change_a_value(data):
    """Structure is checked here; values are covered by the digest in the manifest."""
    damaged = bytearray(written(SAMPLE))
    places = st.integers(0, len(damaged) * 8 - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4, unique=True)):
        damaged[place // 8] ^= 1 << place % 8
    with suppress(CorruptFileError):  # any other error fails the test
        read_state(memoryview(damaged))


def test_large_tensors_are_handed_over_without_a_copy():
    tensor = torch.zeros(1 << 20)
    places = []

    class Sink:
        def write(self, data):
            if len(data) == tensor.nbytes:
                places.append(np.frombuffer(data, np.uint8).ctypes.data)

    write_state(Sink(), {"x": tensor})
    assert places == [tensor.data_ptr()]
