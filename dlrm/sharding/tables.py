"""Initial values of the sharded tables on this rank.

They depend only on seed, table name and position in the table, so that a run starts from the same model on
any number of ranks and under any plan.
"""

import hashlib
from typing import Final

import torch
from torch import nn

from cpr.shards import TableShard, table_groups
from dlrm.sharding.splitting.operator_tables import OperatorTables

INIT_CHUNK_ROWS: Final = 65_536


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Set all table shards on this rank to uniform values in the range that the table's config names.

    The range is `weight_init_min` to `weight_init_max` of TorchRec's config, by default +-1 / sqrt(rows).
    Operator tables get the weights of the unsplit model instead.
    """
    for group in table_groups(model):
        for table, (low, high) in zip(group.tables, group.initial_ranges, strict=True):
            _fill(table, low, high, seed)
    for module in model.modules():
        if isinstance(module, OperatorTables):
            module.initialize()


def _fill(table: TableShard, low: float, high: float, seed: int) -> None:
    num_rows, dim = table.table_shape
    first_row, after_last = table.extent.rows
    for chunk in range(first_row // INIT_CHUNK_ROWS, -(-after_last // INIT_CHUNK_ROWS)):
        start = chunk * INIT_CHUNK_ROWS
        digest = hashlib.sha256(f"{seed}/{table.table_name}/{chunk}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(min(INIT_CHUNK_ROWS, num_rows - start), dim)
        values.uniform_(low, high, generator=generator)
        begin, end = max(first_row, start), min(after_last, start + values.shape[0])
        columns = slice(*table.extent.cols)
        table.weights[begin - first_row : end - first_row].copy_(values[begin - start : end - start, columns])
