"""Checks that a saved state fits the shards that it is loaded into, before anything is written."""

from collections.abc import Iterable

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.cover import check_cover
from cpr.checkpoint.format.manifest import TableEntry
from cpr.checkpoint.format.part import table_entry
from cpr.errors import MismatchError
from cpr.shards.shard import TableShard


def check_fit(state: State, shard: TableShard) -> None:
    """Refuse a state of another model, and one that does not hold each row of the shard exactly once.

    Raises:
        MismatchError: the table is missing in the state, or has other rows, columns, data types or optimizer
            states; names the table and both values.
        CorruptFileError: some of the shard's rows are missing in the base, or in two files of a save.
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
        check_cover(save, shard.extent)


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
