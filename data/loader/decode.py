"""Decodes an Arrow row group to checked columns, without copies where the types allow it.

All errors in prepared data are caught here, before a wrong id reaches a table or a NaN the loss. The message
names the file, the column, the expected and the found value, and what to do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.dataset import DatasetManifest, Feature
from data.loader.columns import Column, Rows


class DecodeError(ValueError):
    """A column does not hold what the manifest says.

    Attributes:
        reason: what it holds, also for those who have no file: the records of a stream.
    """

    def __init__(self, file: str, reason: str, advice: str = "") -> None:
        super().__init__(f"{file}: {reason}{advice or f'; {PREPARE_AGAIN}'}")
        self.reason = reason


def decode(table: pa.Table, manifest: DatasetManifest, file: str) -> Rows:
    """View the columns of a row group after checking them against the manifest.

    Args:
        table: the columns `manifest.columns`, in that order.
        manifest: names and limits of the columns.
        file: the file's name, for messages.

    Raises:
        DecodeError: a wrong type, a null, an id outside its table (raw ids have none), a label that is not
            0 or 1, a dense value or weight that is not finite, more or fewer weights than ids.
    """
    ids = tuple(_ids(table, feature, file) for feature in manifest.features)
    return Rows(
        label=_label(table, manifest.label, file),
        dense=tuple(_dense(table, name, file) for name in manifest.dense),
        ids=ids,
        weights=tuple(
            _weights(table, feature, own, file) if feature.weights else None
            for feature, own in zip(manifest.features, ids, strict=True)
        ),
    )


def _label(table: pa.Table, name: str, file: str) -> Column:
    array = _array(table, name, file)
    if not (pa.types.is_boolean(array.type) or _is_number(array.type)):
        raise _wrong_type(file, name, "an integer, a float or a bool", array.type)
    column = Column(array.to_numpy(zero_copy_only=False))
    wrong = (column.values != 0) & (column.values != 1)
    if wrong.any():
        what, where = _first(name, column, wrong)
        raise DecodeError(file, f"{what}; a label is 0 or 1", f" ({where}); {PREPARE_AGAIN}")
    return column


def _dense(table: pa.Table, name: str, file: str) -> Column:
    array = _array(table, name, file)
    if not _is_number(array.type):
        raise _wrong_type(file, name, "float32 or another number", array.type)
    return Column(_finite(array.to_numpy(), name, file))


def _ids(table: pa.Table, feature: Feature, file: str) -> Column:
    column = _values_or_lists(table, feature.name, file, _is_id, "int32 or int64")
    ids = column.values
    if feature.rows and len(ids) and (ids.min() < 0 or ids.max() >= feature.rows):
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise DecodeError(
            file,
            f"column {feature.name} holds id {worst}, but its table has {feature.rows} rows: ids go from 0 "
            f"to {feature.rows - 1}",
            f". Manifest and file do not belong together; {PREPARE_AGAIN}",
        )
    return column


def _weights(table: pa.Table, feature: Feature, ids: Column, file: str) -> Column:
    name = feature.weights
    column = _values_or_lists(table, name, file, _is_number, "float32")
    wrong = ids.lengths() != column.lengths()
    if wrong.any():
        row = int(wrong.argmax())
        raise DecodeError(
            file,
            f"column {name} has {column.lengths()[row]} weights, but {feature.name} has {ids.lengths()[row]} "
            "ids; each id needs one",
            f" (row {row} of a row group); {PREPARE_AGAIN}",
        )
    return Column(_finite(column.values, name, file), column.offsets)


def _values_or_lists(
    table: pa.Table, name: str, file: str, is_right: Callable[[pa.DataType], bool], expected: str
) -> Column:
    """A column of single values or of lists."""
    array = _array(table, name, file)
    found = array.type
    if pa.types.is_fixed_size_list(found):
        array = array.cast(pa.list_(found.value_type))
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    values, offsets = array, None
    if is_list:
        offsets = array.offsets.to_numpy()
        values = array.values[offsets[0] : offsets[-1]]  # a slice's array has the values of all rows
        offsets = offsets - offsets[0] if offsets[0] else offsets
    if not is_right(values.type):
        raise _wrong_type(file, name, f"{expected}, or lists of it", found)
    if values.null_count:
        raise _nulls(file, name)
    return Column(values.to_numpy(), offsets)


def _finite(values: NDArray[Any], name: str, file: str) -> NDArray[np.float32]:
    """The values as float32, all finite."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32, copy=False)
    if not np.isfinite(narrow).all():
        what, where = _first(name, Column(values), ~np.isfinite(narrow))
        raise DecodeError(file, f"{what}, which is not finite in float32", f" ({where}); {PREPARE_AGAIN}")
    return narrow


def _is_number(found: pa.DataType) -> bool:
    return bool(pa.types.is_integer(found) or pa.types.is_floating(found))


def _is_id(found: pa.DataType) -> bool:
    """Whether a type holds ids: any integers that fit into int64."""
    return bool(pa.types.is_integer(found) and found != pa.uint64())


def _array(table: pa.Table, name: str, file: str) -> pa.Array:
    """A column without nulls, in one piece; of a dictionary-encoded one the values."""
    chunked = table.column(name)
    if chunked.null_count:
        raise _nulls(file, name)
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _first(name: str, column: Column, wrong: NDArray[np.bool_]) -> tuple[str, str]:
    """The first wrong value, and where it is."""
    row = int(wrong.argmax())
    return f"column {name} holds {column.values[row]}", f"row {row} of a row group"


def _nulls(file: str, column: str) -> DecodeError:
    return DecodeError(
        file,
        f"column {column} has missing values, but every sample needs all its fields",
        "; `python -m data.prepare` and `python -m data.convert` fill what is missing in raw data",
    )


def _wrong_type(file: str, column: str, expected: str, found: pa.DataType) -> DecodeError:
    return DecodeError(file, f"column {column} should be {expected}, but is {found}")


PREPARE_AGAIN = "prepare, convert or index the data again with this version"
