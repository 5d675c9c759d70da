"""What one rank has written of a save, as entries of the manifest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cpr.checkpoint.format.manifest import (
    ROW,
    ColumnEntry,
    RowFileEntry,
    StateFileEntry,
    TableEntry,
)
from cpr.shards.shard import TableShard


@dataclass(kw_only=True)
class Part:
    """What one rank has written; travels to rank 0."""

    rows: list[RowFileEntry] = field(default_factory=list)
    states: list[StateFileEntry] = field(default_factory=list)
    tables: dict[str, TableEntry] = field(default_factory=dict)


def tables_of(shards: Iterable[TableShard]) -> dict[str, TableEntry]:
    """What a manifest says of the tables that shards are from, by name; their counters as of now."""
    return {shard.table_fqn: table_entry(shard) for shard in shards}


def table_entry(shard: TableShard) -> TableEntry:
    """What a manifest says of the table that a shard is from."""
    return TableEntry(
        rows=shard.table_shape[0],
        cols=shard.table_shape[1],
        columns=column_entries(shard.columns),
        counters={name: counter.item() for name, counter in shard.counters.items()},
    )


def merge_tables(parts: Sequence[Part]) -> Mapping[str, TableEntry]:
    """The tables of all ranks, by name.

    Their columns are those that were written. An optimizer may have made its state since a rolling save
    began, and a row belongs together with the state that was copied with it.
    """
    tables = {fqn: entry for part in parts for fqn, entry in sorted(part.tables.items())}
    for entry in (entry for part in parts for entry in part.rows):
        columns = {name: column for name, column in entry.columns.items() if name != ROW}
        tables[entry.table_fqn] = replace(tables[entry.table_fqn], columns=columns)
    return tables


def column_entries(columns: Mapping[str, Tensor]) -> dict[str, ColumnEntry]:
    """What a manifest says of the columns of rows, by name."""
    return {
        name: ColumnEntry(dtype=str(column.dtype).removeprefix("torch."), per_row=column.dim() == 1)
        for name, column in columns.items()
    }
