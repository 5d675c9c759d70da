"""Table shards of this worker: live views of their weights and optimizer state, by row."""

from cpr.shards.groups import TableGroup, table_groups
from cpr.shards.optimizers import create_state
from cpr.shards.row_columns import add_row_columns
from cpr.shards.shard import TableShard
from cpr.shards.shard_discovery import dense_tensors, find_shards
from cpr.shards.updates import before_updates

__all__ = [
    "TableGroup",
    "TableShard",
    "add_row_columns",
    "before_updates",
    "create_state",
    "dense_tensors",
    "find_shards",
    "table_groups",
]
