"""Initial values of the sharded tables on this rank.

They depend only on seed, table name and position in the table, so that a run starts from the same model on
any number of ranks and under any plan. Each row is written once: TorchRec, which would set all rows twice
while it shards a model, is kept from it (`uninitialized_tables`).
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cpr.processes import cores_of_worker
from cpr.shards import TableShard, table_groups
from dlrm.sharding.splitting.operator_tables import OperatorTables

Values = npt.NDArray[np.float32]
INIT_CHUNK_ROWS: Final = 65_536
DRAWN_AT_ONCE: Final = 2**17
"""Values that fit into a core's cache."""
TORCHREC_INITIALISERS: Final = (
    (BaseBatchedEmbedding, "init_parameters"),
    (BaseBatchedEmbeddingBag, "init_parameters"),
    (ShardedEmbeddingCollection, "reset_parameters"),
    (ShardedEmbeddingBagCollection, "reset_parameters"),
)
"""Methods that set the values of tables while a model is sharded, the latter once more."""


@contextmanager
def uninitialized_tables() -> Iterator[None]:
    """Leave tables of a model that is sharded in the block as they were allocated; the same on all ranks."""
    with ExitStack() as patches:
        for owner, method in TORCHREC_INITIALISERS:
            patches.enter_context(patch.object(owner, method, _leave))
        yield


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Set all table shards on this rank to uniform values in the range that the table's config names.

    The range is `weight_init_min` to `weight_init_max` of TorchRec's config, by default +-1 / sqrt(rows).
    Operator tables get the weights of the unsplit model instead.
    """
    with ThreadPoolExecutor(cores_of_worker(), "initial-values") as pool:
        filled = [
            pool.submit(fill)
            for group in table_groups(model)
            for table, (low, high) in zip(group.tables, group.initial_ranges, strict=True)
            for fill in _fills(table, low, high, seed)
        ]
        for each in filled:
            each.result()
    for module in model.modules():
        if isinstance(module, OperatorTables):
            module.initialize()


def _fills(table: TableShard, low: float, high: float, seed: int) -> Iterator[Callable[[], None]]:
    """Functions that each set some rows of a shard."""
    first_row, after_last = table.extent.rows
    for chunk in range(first_row // INIT_CHUNK_ROWS, -(-after_last // INIT_CHUNK_ROWS)):
        yield partial(_fill, table, low, high, seed, chunk)


def _fill(table: TableShard, low: float, high: float, seed: int, chunk: int) -> None:
    num_rows, dim = table.table_shape
    first_row, after_last = table.extent.rows
    start, stop = chunk * INIT_CHUNK_ROWS, min((chunk + 1) * INIT_CHUNK_ROWS, num_rows)
    digest = hashlib.sha256(f"{seed}/{table.table_name}/{chunk}".encode()).digest()
    begin, end = max(first_row, start), min(after_last, stop)
    rows = table.weights[begin - first_row : end - first_row]
    is_whole = rows.shape == (stop - start, dim) and rows.is_contiguous()
    is_drawn_in_place = is_whole and rows.device.type == "cpu" and rows.dtype == torch.float32
    values = rows if is_drawn_in_place else torch.empty(stop - start, dim)
    draw_uniform(values.view(-1).numpy(), low, high, int.from_bytes(digest))
    if not is_drawn_in_place:
        rows.copy_(values[begin - start : end - start, slice(*table.extent.cols)])


def draw_uniform(values: Values, low: float, high: float, seed: int) -> None:
    """Set `values`, fp32 `[n]`, to uniform ones from `low` to `high`, of 2^23 levels.

    Twice as fast as PyTorch's generator: most of the time of a first start on large tables.
    """
    generator = np.random.SFC64(seed)
    for start in range(0, len(values), DRAWN_AT_ONCE):
        drawn = values[start : start + DRAWN_AT_ONCE]
        bits = generator.random_raw(-(-len(drawn) // 2)).view(np.uint32)[: len(drawn)]
        bits >>= np.uint32(9)
        bits |= np.uint32(0x3F80_0000)  # the exponent of fp32 numbers from 1 to 2
        np.subtract(bits.view(np.float32), np.float32(1), out=drawn)
        drawn *= np.float32(high - low)
        drawn += np.float32(low)


def _leave(owner: Any) -> None:
    """Set no values."""
