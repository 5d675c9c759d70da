"""Manifest entries that each rank makes for its files and its tables, and how rank 0 merges them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cpr.checkpoint.format.manifest import ROW, ColumnEntry, RowFileEntry, StateFileEntry, TableEntry
from cpr.shards.shard import TableShard


@dataclass(kw_only=True)
class RankPart:
    """Entries of the files that one rank has written for a save; sent to rank 0."""

    rows: list[RowFileEntry] = field(default_factory=list)
    states: list[StateFileEntry] = field(default_factory=list)
    tables: dict[str, TableEntry] = field(default_factory=dict)


def tables_of(shards: Iterable[TableShard]) -> dict[str, TableEntry]:
    """Make manifest entries of the shards' tables, by name, with their optimizers' counters as of now."""
    return {shard.table_fqn: table_entry(shard) for shard in shards}


def table_entry(shard: TableShard) -> TableEntry:
    """Manifest entry of the table that a shard belongs to, with the present counters."""
    return TableEntry(
        rows=shard.table_shape[0],
        cols=shard.table_shape[1],
        columns=column_entries(shard.columns),
        counters={name: counter.item() for name, counter in shard.counters.items()},
    )


def merge_tables(parts: Sequence[RankPart]) -> Mapping[str, TableEntry]:
    """Merge the tables of all ranks, by name.

    Their columns are those of the files: an optimizer may have created its state after a rolling save began,
    and a row must be loaded with the state that was copied with it.
    """
    tables = {fqn: entry for part in parts for fqn, entry in sorted(part.tables.items())}
    for entry in (entry for part in parts for entry in part.rows):
        columns = {name: column for name, column in entry.columns.items() if name != ROW}
        tables[entry.table_fqn] = replace(tables[entry.table_fqn], columns=columns)
    return tables


def column_entries(columns: Mapping[str, Tensor]) -> dict[str, ColumnEntry]:
    """Manifest entries of columns, by name."""
    return {
        name: ColumnEntry(dtype=str(column.dtype).removeprefix("torch."), per_row=column.dim() == 1)
        for name, column in columns.items()
    }
