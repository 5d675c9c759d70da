"""Nested state as JSON next to a file of tensors: the JSON holds plain values and the names of the tensors.

Exports use this form so that everything that is not a tensor stays readable with any JSON parser. Values that
JSON lacks are objects with one key that begins with `$`: `$tensor` and `$array` name a tensor, `$raw_array`
holds data type, shape and base64 of an array that PyTorch cannot hold, and `$bytes`, `$float`, `$tuple` and
`$items` (a dict whose keys are not all plain strings) hold their values.
"""

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TreePath = tuple[str, ...]
"""Keys and list indices from the root of a tree to a value in it."""


def to_json(tree: Any, path: TreePath, tensors: dict[TreePath, Tensor]) -> Any:
    """Convert nested state, as `cpr.checkpoint.format.tree_file` takes, to JSON.

    Its tensors are added to `tensors`, under names that begin with `path`.
    """
    if isinstance(tree, Tensor):
        return {"$tensor": _add(tree, path, tensors)}
    if isinstance(tree, np.ndarray):
        return _array(tree, path, tensors)
    if isinstance(tree, list | tuple):
        values = [to_json(value, (*path, str(at)), tensors) for at, value in enumerate(tree)]
        return {"$tuple": values} if isinstance(tree, tuple) else values
    if isinstance(tree, Mapping):
        items = [(key, to_json(value, (*path, str(key)), tensors)) for key, value in tree.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
        return dict(items) if is_plain else {"$items": items}
    return _plain(tree)


def flat_name(path: Iterable[str]) -> str:
    """Name of the value at a path, as `torch.distributed.checkpoint` flattens nested state."""
    return ".".join(path)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


def _array(array: "np.ndarray[Any, Any]", path: TreePath, tensors: dict[TreePath, Tensor]) -> Any:
    try:
        in_order = np.ascontiguousarray(array).reshape(array.shape)  # which adds a dimension to scalars
        return {"$array": _add(torch.from_numpy(in_order), path, tensors)}
    except (TypeError, ValueError):  # a data type or byte order that PyTorch lacks
        data = base64.b64encode(array.tobytes()).decode()
        return {"$raw_array": [array.dtype.str, list(array.shape), data]}


def _add(tensor: Tensor, path: TreePath, tensors: dict[TreePath, Tensor]) -> str:
    taken = {flat_name(other) for other in tensors}
    while flat_name(path) in taken:  # such as ("a.b",) after ("a", "b")
        path = (*path[:-1], path[-1] + "'")
    tensors[path] = tensor
    return flat_name(path)
