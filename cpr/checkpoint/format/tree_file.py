"""State files: everything that is not a table, as a tree of plain data with tensors at its leaves.

The file is an Arrow IPC file. Each row is a leaf with bytes of its own: `name` (its path in the tree),
`dtype`, `shape` and `data` (little-endian, row-major). The schema's metadata holds the tree as JSON under
`tree`: plain values stand for themselves, and what JSON lacks is an object of one key,

    {"tensor": 3}  {"ndarray": 3}  {"bytes": 3}    the leaf in row 3
    {"dict": [[key, value], ...]}                  keys are strings or integers, in order
    {"tuple": [value, ...]}
    {"float": "nan"}                               or "inf", "-inf"
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.storage.base import HashingSink, Sink
from cpr.errors import CorruptFileError
from cpr.strict_json import parse

FORMAT: Final = {b"format": b"cpr-state", b"version": b"1"}
SCHEMA: Final = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
DAMAGE: Final = (
    *(pa.ArrowException, OSError, ValueError, TypeError, LookupError, RuntimeError),
    *(ArithmeticError, AttributeError),
    SyntaxError,  # numpy's, for a dtype that is none
)
"""Exceptions that parsing damaged bytes may raise."""
BYTES: Final = "bytes"
NUMBERS: Final = "biufc"
"""Kinds of numpy dtypes that can be saved: bool, int, unsigned, float, complex."""


def write_state(sink: Sink, tree: Any) -> HashingSink:
    """Write a tree to a file; returns its size and digest.

    When read back, tensors are on the CPU, without `requires_grad`; `OrderedDict` is `dict`, `torch.Size` is
    `tuple`; tensors that shared memory no longer do.

    A tree is made of dict (with str and int keys), list, tuple, str, int, float, bool, None, bytes, dense
    tensors, and numpy arrays of numbers. Tensors in host memory are written without a copy.

    Raises:
        ValueError: the tree holds another type of value; the message says where.
    """
    encoded, leaves = encode(tree)
    schema = SCHEMA.with_metadata({**FORMAT, b"tree": json.dumps(encoded, allow_nan=False)})
    hashing = HashingSink(sink)
    with pa.ipc.new_file(pa.PythonFile(hashing, mode="w"), schema) as writer:
        for leaf in leaves:
            writer.write_batch(_batch(leaf, schema))
    return hashing


def state_bytes(tree: Any) -> bytearray:
    """The file that `write_state` writes, in memory.

    Raises:
        ValueError: as `write_state`.
    """
    sink = _Memory()
    write_state(sink, tree)
    return sink.data


class _Memory:
    """A sink in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> None:
        self.data += data


def read_state(data: memoryview) -> Any:
    """Read the tree in a file that `write_state` wrote; tensors get memory of their own.

    Raises:
        CorruptFileError: `data` is not a state file, or damaged.
    """
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as reader:
            metadata = dict(reader.schema.metadata or {})
            tree = parse(metadata.pop(b"tree", b""))
            if metadata != FORMAT or not reader.schema.equals(SCHEMA):
                raise ValueError(f"its schema is another: {reader.schema.to_string()}")
            rows: list[dict[str, Any]] = []
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                rows += (dict(zip(SCHEMA.names, row, strict=True)) for row in zip(*batch, strict=True))
            return decode(tree, lambda kind, row: LEAVES[kind](**rows[row]))
    except DAMAGE as error:
        raise CorruptFileError(f"the state file is damaged or no state file ({error})") from error


Path = tuple[str | int, ...]
Array = np.ndarray[Any, np.dtype[Any]]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _refuse(path: Path, what: str) -> ValueError:
    return ValueError(f"{_dotted(path) or 'the state itself'} cannot be saved: {what}")


@dataclass(frozen=True)
class Leaf:
    """A tensor, array or `bytes` object in a tree."""

    path: Path
    """Keys and list indices from the root of the tree."""
    value: Tensor | Array | bytes
    """The object in the tree, not copied."""


def encode(tree: Any) -> tuple[Any, list[Leaf]]:
    """A tree as JSON, in the form above, and the leaves that the JSON refers to by number.

    Raises ValueError if a value in the tree cannot be saved; the message says where.
    """
    encoder = _Encoder()
    return encoder.encode(tree, ()), encoder.leaves


def decode(node: Any, leaf: Callable[[str, int], Any]) -> Any:
    """Restore a tree from the JSON that `encode` made; raises ValueError if `node` has another form.

    `leaf` returns the leaf of a kind ("tensor", "ndarray" or "bytes") and number.
    """
    if isinstance(node, list):
        return [decode(item, leaf) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in LEAVES:
        return leaf(kind, content)
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: decode(value, leaf) for key, value in content}
    if kind == "tuple":
        return tuple(decode(value, leaf) for value in content)
    raise ValueError(f"it has a node of kind {kind!r}")


def _batch(leaf: Leaf, schema: pa.Schema) -> pa.RecordBatch:
    dtype, shape, data = _stored(leaf.value)
    content = pa.py_buffer(data)
    ends = pa.py_buffer(np.array([0, content.size], dtype=np.int64))
    columns = [
        pa.array([_dotted(leaf.path).encode(errors="replace")], pa.string()),
        pa.array([dtype], pa.string()),
        pa.array([shape], pa.list_(pa.int64())),
        pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, content]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _stored(value: Tensor | Array | bytes) -> tuple[str, tuple[int, ...], Array]:
    """Dtype, shape and bytes of a leaf, as stored."""
    if isinstance(value, Tensor):
        on_host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = on_host.view(-1).view(torch.uint8).numpy()
        return dtype_name(value), tuple(value.shape), data
    if isinstance(value, bytes):
        return BYTES, (len(value),), np.frombuffer(value, np.uint8)
    return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def dtype_name(tensor: Tensor) -> str:
    """Name of a tensor's dtype without `torch.`, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


class _Encoder:
    """Turns a tree into JSON and collects its leaves."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._open: set[int] = set()

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in {bool, int, str}:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in {list, tuple, torch.Size, dict, OrderedDict}:
            return self._encode_inside(value, path)
        if kind is bytes:
            return self._add("bytes", Leaf(path, value))
        if kind in {Tensor, nn.Parameter}:
            if value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise _refuse(path, f"it is a tensor without plain memory ({value.layout}, {value.device})")
            return self._add("tensor", Leaf(path, value))
        if kind is np.ndarray:
            if value.dtype.kind not in NUMBERS:
                raise _refuse(path, f"it is a numpy array of dtype {value.dtype}; use numbers")
            return self._add("ndarray", Leaf(path, value))
        raise _refuse(
            path,
            f"it is a {kind.__module__}.{kind.__qualname__}; use plain dict, list, tuple, str, int, float, "
            "bool, None, bytes, tensors and numpy arrays",
        )

    def _encode_inside(self, value: Any, path: Path) -> Any:
        if id(value) in self._open:
            raise _refuse(path, "it contains itself")
        self._open.add(id(value))
        if isinstance(value, dict):
            encoded: Any = {"dict": [self._encode_item(key, item, path) for key, item in value.items()]}
        else:
            encoded = [self.encode(item, (*path, place)) for place, item in enumerate(value)]
            if isinstance(value, tuple):
                encoded = {"tuple": encoded}
        self._open.remove(id(value))
        return encoded

    def _encode_item(self, key: Any, item: Any, path: Path) -> list[Any]:
        if type(key) not in {str, int}:
            raise _refuse(path, f"it has the key {key!r}; use str or int")
        return [key, self.encode(item, (*path, key))]

    def _add(self, kind: str, leaf: Leaf) -> dict[str, int]:
        self.leaves.append(leaf)
        return {kind: len(self.leaves) - 1}


def _bytes(name: pa.Scalar, dtype: pa.Scalar, shape: pa.Scalar, data: pa.Scalar) -> bytes:
    return _content(name, shape, 1, data).tobytes()


def _tensor(name: pa.Scalar, dtype: pa.Scalar, shape: pa.Scalar, data: pa.Scalar) -> Tensor:
    kind = getattr(torch, dtype.as_py(), None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    content = _content(name, shape, kind.itemsize, data)
    tensor = torch.empty(shape.as_py(), dtype=kind)
    tensor.view(-1).view(torch.uint8).numpy()[:] = content
    return tensor


def _array(name: pa.Scalar, dtype: pa.Scalar, shape: pa.Scalar, data: pa.Scalar) -> Array:
    kind = np.dtype(dtype.as_py())
    if kind.kind not in NUMBERS:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    content = _content(name, shape, kind.itemsize, data)
    array: Array = np.empty(shape.as_py(), dtype=kind)
    array.reshape(-1).view(np.uint8)[:] = content
    return array


def _content(name: pa.Scalar, shape: pa.Scalar, itemsize: int, data: pa.Scalar) -> Array:
    content: Array = np.frombuffer(data.as_buffer(), np.uint8)
    sizes = shape.as_py()
    if min(sizes, default=0) < 0 or math.prod(sizes) * itemsize != content.size:
        raise ValueError(f"{name} has {content.size} bytes for the shape {sizes}")
    return content


LEAVES: Final = {"bytes": _bytes, "tensor": _tensor, "ndarray": _array}


def decode_state(data: memoryview, path: str, save: Manifest, rank: int | None) -> Any:
    """Decode a state file whose bytes have been verified.

    Raises:
        CorruptFileError: its content is not what a save writes.
    """
    try:
        tree = read_state(data)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise CorruptFileError(f"{path} holds a {type(tree).__name__}, not states by name")
    if rank is None and (fault := _fault_of_common(tree, save)):
        raise CorruptFileError(f"{path}: {fault}; load an older state")
    return tree


def _fault_of_common(tree: dict[Any, Any], save: Manifest) -> str | None:
    dense, registered, steps_done = (tree.get(name) for name in ("dense", "registered", "steps_done"))
    if not isinstance(dense, dict) or not isinstance(registered, dict):
        return "it holds no dense parameters, or no registered states"
    if not all(isinstance(each, Tensor) for each in dense.values()):
        return "its dense parameters are not all tensors"
    if steps_done != save.step:
        return f"it is of step {steps_done}, its manifest of step {save.step}"
    return None
