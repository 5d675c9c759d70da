"""Checks that the files of a save hold each row and column of its tables exactly once."""

import numpy as np

from cpr.checkpoint.format.manifest import Manifest
from cpr.errors import CorruptFileError
from cpr.extent import Extent


def check_tables(save: Manifest) -> None:
    """Refuse a save from which some table could not be fully loaded.

    Raises:
        CorruptFileError: a base lacks some rows of a table, or a row is in two files of the save.
    """
    for table_fqn, table in save.tables.items():
        check_cover(save, Extent.of_table(table_fqn, (table.rows, table.cols)))


def check_cover(save: Manifest, whole: Extent) -> None:
    """As `check_tables`, for a part of one table."""
    parts = [part for entry in save.rows if (part := entry.extent.overlap(whole))]
    rows = np.unique([extent.rows for extent in (whole, *parts)])
    cols = np.unique([extent.cols for extent in (whole, *parts)])
    counts = np.zeros((len(rows) - 1, len(cols) - 1), dtype=np.int32)
    for part in parts:
        cells = np.searchsorted(rows, part.rows), np.searchsorted(cols, part.cols)
        counts[slice(*cells[0]), slice(*cells[1])] += 1
    fewest = 1 if save.kind == "base" else 0
    for row, col in np.argwhere((counts < fewest) | (counts > 1))[:1]:
        where = (
            f"rows {rows[row]} to {rows[row + 1] - 1}, columns {cols[col]} to {cols[col + 1] - 1} of table "
            f"{whole.table_fqn}"
        )
        path = save.path
        if counts[row, col]:
            raise CorruptFileError(f"{path} has {where} in two files, and cannot say which is right")
        raise CorruptFileError(
            f"{path} is a base without {where}: the save is incomplete; load an older state, or save a new "
            "base with all workers"
        )
