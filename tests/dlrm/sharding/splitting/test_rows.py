"""Row-wise tables on the CPU, part by part; tests/system has whole models."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.sequences import _look_nothing_up, _separate_empty_pieces
from dlrm.sharding.splitting.rows import _RowSums


def make_tables(*shapes):
    """Tables `(rows, columns)`, all weights 1."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for shape in shapes],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
    )
    tables.init_embedding_weights_uniform(1, 1)
    return tables


def test_empty_pieces_do_not_change_other_tables():
    """Before a table of another width, and last, where FBGEMM would look beyond its offsets."""
    some, all_of_them = make_tables((5, 4)), make_tables((0, 8), (5, 4), (0, 4))
    _separate_empty_pieces(all_of_them)
    assert all_of_them.hash_size_cumsum.tolist() == [0, 1, 6, 7]
    ids = torch.tensor([0, 4, 4])
    some(ids, torch.tensor([0, 1, 3])).sum().backward()
    offsets = torch.tensor([0, 0, 0, 1, 3, 3, 3])
    pooled = all_of_them(ids, offsets)
    assert pooled.tolist() == [[0] * 8 + [1] * 4 + [0] * 4, [0] * 8 + [2] * 4 + [0] * 4]
    pooled.sum().backward()
    assert torch.equal(all_of_them.weights_host, some.weights_host)
    assert torch.equal(all_of_them.momentum1_host, some.momentum1_host)


def test_host_lookups_return_one_dtype_with_and_without_rows():
    """Or ranks without rows would send other numbers than the rest expects."""
    empty, some = make_tables((0, 4)), make_tables((5, 4))
    empty.forward = partial(_look_nothing_up, empty)
    assert use_host_lookups([empty, some], torch.bfloat16) == 2
    nothing = empty(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    something = some(torch.zeros(3, dtype=torch.int64), torch.arange(4))
    assert nothing.dtype == something.dtype == torch.bfloat16
    assert nothing.shape == something.shape
    assert not nothing.any()
    nothing.sum().backward()


def test_variable_batch_sizes_per_feature_are_refused():
    with pytest.raises(ValueError, match="as many bags, or shard their tables table_wise"):
        _RowSums(None)(torch.zeros(2, 4), SimpleNamespace(variable_batch_per_feature=True))
