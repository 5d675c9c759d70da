"""The sharded tables of a model on this rank: finding them, and giving them their initial values.

Initial values depend on the seed, the table's name and the place in the table alone, so that the same run
starts from the same model on any number of ranks and under any plan.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

INIT_CHUNK_ROWS: Final = 65_536


def table_groups(model: nn.Module) -> Iterator[Any]:
    """TorchRec's lookup modules on this rank, each a group of table shards in one FBGEMM module."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:  # TorchRec hides lookups from modules()
                # replicated ones sit in a DistributedDataParallel
                yield from getattr(lookup, "module", lookup)._emb_modules


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Set all table shards on this rank to uniform values in +-1 / sqrt(rows)."""
    for group in table_groups(model):
        shards = group.split_embedding_weights()
        for table, weights in zip(group.config.embedding_tables, shards, strict=True):
            row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
            _fill(
                weights.detach(), table.name, (table.num_embeddings, table.embedding_dim), (row, column), seed
            )


def _fill(shard: Tensor, name: str, shape: tuple[int, int], offsets: tuple[int, int], seed: int) -> None:
    (num_rows, dim), (first_row, first_column) = shape, offsets
    bound = num_rows**-0.5
    last_row = first_row + shard.shape[0]
    for chunk in range(first_row // INIT_CHUNK_ROWS, -(-last_row // INIT_CHUNK_ROWS)):
        start = chunk * INIT_CHUNK_ROWS
        digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(min(INIT_CHUNK_ROWS, num_rows - start), dim)
        values.uniform_(-bound, bound, generator=generator)
        low, high = max(first_row, start), min(last_row, start + values.shape[0])
        columns = slice(first_column, first_column + shard.shape[1])
        shard[low - first_row : high - first_row].copy_(values[low - start : high - start, columns])
