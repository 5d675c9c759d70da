"""Whether a saved state fits the shards that it is to be loaded into; asked before anything is written."""

from collections.abc import Iterable

import numpy as np

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import Manifest, RowFileEntry, TableEntry
from cpr.checkpoint.format.part import table_entry
from cpr.checkpoint.format.row_schema import ShardPlace
from cpr.errors import CorruptFileError, MismatchError
from cpr.shards.shard import TableShard

Interval = tuple[int, int]
Box = tuple[Interval, Interval]
"""Rows and columns, each from the first to before the last."""


def check_fit(state: State, shard: TableShard) -> None:
    """Refuse a state of another model, and one that does not hold each row of the shard exactly once.

    Raises:
        MismatchError: the table is not in it, or has other rows, columns, data types or optimizer states
            there; names the table and both values.
        CorruptFileError: the save is incomplete: some of the shard's rows are not in the base; or a manifest
            of the state contradicts itself.
    """
    path = state.newest.path
    saved = state.newest.tables.get(shard.table_fqn)
    if saved is None:
        raise MismatchError(
            f"{path} has no table {shard.table_fqn}; it has {_listed(state.newest.tables)}. Load it into the "
            "model that it was saved from, or give this model a checkpoint directory of its own"
        )
    _check_table(shard, saved, path)
    for save in state.saves:
        check_cover(save, shard.table_fqn, box(shard))


def check_tables(save: Manifest) -> None:
    """Refuse a save from which some table could not be loaded as a whole.

    Raises:
        CorruptFileError: a base lacks some rows of a table, or a row is in two files of the save.
    """
    for table_fqn, table in save.tables.items():
        check_cover(save, table_fqn, ((0, table.rows), (0, table.cols)))


def box(part: TableShard | RowFileEntry | ShardPlace) -> Box:
    """The rows and columns of its table that a shard, a file, or a place is about."""
    rows = part.row_offset, part.row_offset + part.num_rows
    return rows, (part.col_offset, part.col_offset + part.num_cols)


def overlap(entry: RowFileEntry | ShardPlace, shard: TableShard) -> Box | None:
    """The rows and columns that a file, or a place, and a shard have in common; None if there are none."""
    return _common(box(entry), box(shard)) if entry.table_fqn == shard.table_fqn else None


def _common(one: Box, other: Box) -> Box | None:
    rows, cols = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return (rows, cols) if rows[0] < rows[1] and cols[0] < cols[1] else None


def _check_table(shard: TableShard, saved: TableEntry, path: str) -> None:
    live = table_entry(shard)
    differences = [
        ("size", f"{live.rows} x {live.cols}", f"{saved.rows} x {saved.cols}"),
        ("columns", _columns(live), _columns(saved)),
    ]
    for what, here, there in differences:
        if here != there:
            raise MismatchError(
                f"table {shard.table_fqn}: its {what} in this model: {here}; in {path}: {there}. Build the "
                "model with the tables, data types and optimizer it was saved with (see `cpr describe`), "
                "or give this model a checkpoint directory of its own"
            )


def _columns(table: TableEntry) -> str:
    return _listed(
        f"{name} ({column.dtype} per {'row' if column.per_row else 'element'})"
        for name, column in table.columns.items()
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def check_cover(save: Manifest, table_fqn: str, whole: Box) -> None:
    """A base holds each row and column of a part of a table in one file, a row save in one at most.

    Raises:
        CorruptFileError: this one does not.
    """
    files = [entry for entry in save.rows if entry.table_fqn == table_fqn]
    parts = [common for entry in files if (common := _common(box(entry), whole))]
    rows, cols = (np.unique([interval[axis] for interval in (whole, *parts)]) for axis in (0, 1))
    counts = np.zeros((len(rows) - 1, len(cols) - 1), dtype=np.int32)
    for row_interval, col_interval in parts:
        cells = np.searchsorted(rows, row_interval), np.searchsorted(cols, col_interval)
        counts[slice(*cells[0]), slice(*cells[1])] += 1
    fewest = 1 if save.kind == "base" else 0
    for row, col in np.argwhere((counts < fewest) | (counts > 1))[:1]:
        where = (
            f"rows {rows[row]} to {rows[row + 1] - 1}, columns {cols[col]} to {cols[col + 1] - 1} of table "
            f"{table_fqn}"
        )
        path = save.path
        if counts[row, col]:
            raise CorruptFileError(f"{path} has {where} in two files, and cannot say which is right")
        raise CorruptFileError(
            f"{path} is a base without {where}: the save is incomplete; load an older state, or save a new "
            "base with all workers"
        )
