"""Decodes an Arrow row group to checked columns, without copies.

All errors in prepared data are caught here, before a wrong id reaches a table or a NaN the loss. The message
names the file, the column, the expected and the found value, and what to do.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.criteo import LABEL
from data.dataset import DatasetManifest, Feature
from data.loader.columns import Column, Rows


def decode(table: pa.Table, manifest: DatasetManifest, file: str) -> Rows:
    """View the columns of a row group after checking them against the manifest.

    Args:
        table: the columns of `source.column_names(manifest)`, in that order.
        manifest: names and limits of the columns.
        file: the file's name, for messages.

    Raises:
        ValueError: a wrong type, a null, an id outside its table (raw ids have none), a label that is not
            0 or 1, a dense value that is not finite.
    """
    label = _label(table, file)
    dense = tuple(_dense(table, name, file) for name in manifest.dense)
    ids = tuple(_ids(table, feature, file) for feature in manifest.features)
    return Rows(label, dense, ids)


def _label(table: pa.Table, file: str) -> Column:
    found = table.schema.field(LABEL).type
    if not (pa.types.is_integer(found) or pa.types.is_floating(found)):
        raise _wrong_type(file, LABEL, "an integer or a float", found)
    column = Column(_array(table, LABEL, file).to_numpy())
    wrong = (column.values != 0) & (column.values != 1)
    if wrong.any():
        raise ValueError(f"{file}: {_first(LABEL, column, wrong)}; a label is 0 or 1; {PREPARE_AGAIN}")
    return column


def _dense(table: pa.Table, name: str, file: str) -> Column:
    found = table.schema.field(name).type
    if found != pa.float32():
        raise _wrong_type(file, name, "float32", found)
    column = Column(_array(table, name, file).to_numpy())
    wrong = ~np.isfinite(column.values)
    if wrong.any():
        raise ValueError(f"{file}: {_first(name, column, wrong)}, which is not finite; {PREPARE_AGAIN}")
    return column


def _ids(table: pa.Table, feature: Feature, file: str) -> Column:
    found = table.schema.field(feature.name).type
    array = _array(table, feature.name, file)
    expected = pa.int32() if feature.rows else pa.int64()
    if found == expected:
        column = Column(array.to_numpy())
    elif pa.types.is_list(found) and found.value_type == expected:
        if array.values.null_count:
            raise _nulls(file, feature.name)
        column = Column(array.values.to_numpy(), array.offsets.to_numpy())
    else:
        raise _wrong_type(file, feature.name, f"{expected} or list<{expected}>", found)
    ids = column.values
    if feature.rows and len(ids) and (ids.min() < 0 or ids.max() >= feature.rows):
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"{file}: column {feature.name} holds id {worst}, but its table has {feature.rows} rows: ids "
            f"go from 0 to {feature.rows - 1}. Manifest and file do not belong together; {PREPARE_AGAIN}"
        )
    return column


def _array(table: pa.Table, name: str, file: str) -> pa.Array:
    """A column without nulls, in one piece."""
    chunked = table.column(name)
    if chunked.null_count:
        raise _nulls(file, name)
    return chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()


def _first(name: str, column: Column, wrong: NDArray[np.bool_]) -> str:
    row = int(wrong.argmax())
    return f"column {name} holds {column.values[row]} at row {row} of a row group"


def _nulls(file: str, column: str) -> ValueError:
    return ValueError(
        f"{file}: column {column} has missing values, but every sample needs all its fields; "
        "`python -m data.prepare` fills what is missing in raw data"
    )


def _wrong_type(file: str, column: str, expected: str, found: pa.DataType) -> ValueError:
    return ValueError(f"{file}: column {column} should be {expected} but is {found}; {PREPARE_AGAIN}")


PREPARE_AGAIN = "prepare the data again with this version"
