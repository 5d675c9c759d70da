"""Nested state as JSON beside a file of tensors: values stand in the JSON, tensors are named there.

Exports use it so that everything that is no tensor stays readable with any JSON parser, and so that an import
gives back exactly what was exported. What JSON lacks is an object with one key that begins with `$`.
"""

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.errors import CorruptFileError

Path = tuple[str, ...]
_Array = np.ndarray[Any, np.dtype[Any]]


def to_notes(tree: Any, path: Path, tensors: dict[Path, Tensor]) -> Any:
    """JSON of nested state.

    Args:
        tree: dicts, lists, tuples, plain values, bytes, tensors and arrays, as
            `cpr.checkpoint.format.tree_file` takes.
        path: where in the whole `tree` is; the names of its tensors begin with it.
        tensors: those of `tree` are added here; in the JSON stands `{"$tensor": name}`.
    """
    if isinstance(tree, Tensor):
        return {"$tensor": _add(tree, path, tensors)}
    if isinstance(tree, np.ndarray):
        return _array_notes(tree, path, tensors)
    if isinstance(tree, list | tuple):
        values = [to_notes(value, (*path, str(at)), tensors) for at, value in enumerate(tree)]
        return {"$tuple": values} if isinstance(tree, tuple) else values
    if isinstance(tree, Mapping):
        items = [(key, to_notes(value, (*path, str(key)), tensors)) for key, value in tree.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
        return dict(items) if is_plain else {"$items": items}
    return _plain_notes(tree)


def from_notes(notes: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_notes` was given.

    Args:
        notes: parsed JSON.
        tensors: by name.

    Raises:
        CorruptFileError: a tensor is not there.
    """
    if isinstance(notes, list):
        return [from_notes(value, tensors) for value in notes]
    if not isinstance(notes, dict):
        return notes
    if len(notes) == 1:
        ((kind, content),) = notes.items()
        if kind in _DECODERS:
            return _DECODERS[kind](content, tensors)
    return {key: from_notes(value, tensors) for key, value in notes.items()}


def flat_name(path: Iterable[str]) -> str:
    """Name of what is at a path, as `torch.distributed.checkpoint` flattens it."""
    return ".".join(path)


def _plain_notes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


def _array_notes(array: _Array, path: Path, tensors: dict[Path, Tensor]) -> Any:
    try:
        in_order = np.ascontiguousarray(array).reshape(array.shape)  # without dimensions it would get one
        return {"$array": _add(torch.from_numpy(in_order), path, tensors)}
    except (TypeError, ValueError):  # a data type or byte order that torch lacks
        data = base64.b64encode(array.tobytes()).decode()
        return {"$raw_array": [array.dtype.str, list(array.shape), data]}


def _add(tensor: Tensor, path: Path, tensors: dict[Path, Tensor]) -> str:
    taken = {flat_name(other) for other in tensors}
    while flat_name(path) in taken:  # such as ("a.b",) after ("a", "b")
        path = (*path[:-1], path[-1] + "'")
    tensors[path] = tensor
    return flat_name(path)


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise CorruptFileError(f"there is no tensor {name}: files of this export are missing or not of it")
    return tensors[name]


def _raw_array(content: tuple[str, list[int], str], tensors: Mapping[str, Tensor]) -> _Array:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_DECODERS: Final[Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    "$tensor": _tensor,
    "$array": lambda name, tensors: _tensor(name, tensors).numpy(),
    "$raw_array": _raw_array,
    "$float": lambda text, _: float(text),
    "$bytes": lambda data, _: base64.b64decode(data),
    "$tuple": lambda values, tensors: tuple(from_notes(value, tensors) for value in values),
    "$items": lambda items, tensors: {key: from_notes(value, tensors) for key, value in items},
}
