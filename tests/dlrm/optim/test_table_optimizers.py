"""The registry of table optimizers is complete: each entry builds, and updates alike wherever it is used."""

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from dlrm.config.reference import describe
from dlrm.config.schema import DENSE_OPTIMIZERS, TablesConfig
from dlrm.config.table_optimizers import ROW_OPTIMIZERS, TABLE_OPTIMIZERS
from dlrm.sharding.host_lookup import use_host_lookups

ROWS, COLUMNS = 6, 4


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_every_name_makes_a_pytorch_optimizer_with_the_registered_options_and_state(name):
    known = TABLE_OPTIMIZERS[name]
    weight = nn.Parameter(torch.ones(ROWS, COLUMNS))
    defaults = known.make([weight], lr=0.1).defaults
    assert {option: defaults[option] for option in known.options} == known.options
    assert known.options.keys() <= set(TablesConfig.__dataclass_fields__)
    optimizer = known.make([weight], lr=0.1, **known.options)
    weight.grad = torch.ones(ROWS, COLUMNS)
    optimizer.step()
    assert (weight < 1).all()
    sizes = {key: value.numel() for key, value in optimizer.state[weight].items() if key in known.state}
    assert sizes == {key: torch.Size(shape(ROWS, COLUMNS)).numel() for key, shape in known.state.items()}


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
@pytest.mark.parametrize("by_host_lookup", [False, True])
def test_fbgemm_and_the_host_lookup_update_as_the_pytorch_optimizer_does(name, by_host_lookup):
    known = TABLE_OPTIMIZERS[name]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=known.fbgemm_type,
        learning_rate=0.1,
        **known.options,
    )
    tbe.init_embedding_weights_uniform(-1, 1)
    weight = nn.Parameter(tbe.weights_host.detach().clone().view(ROWS, COLUMNS))
    optimizer = known.make([weight], lr=0.1, **known.options)
    if by_host_lookup:
        assert use_host_lookups([tbe], torch.float32) == (known.update_rows is not None)
    ids, gradient = torch.tensor([1, 4]), torch.randn(2, COLUMNS)
    tbe(ids, torch.arange(3)).backward(gradient)
    weight.grad = torch.zeros(ROWS, COLUMNS).index_add(0, ids, gradient)
    optimizer.step()
    torch.testing.assert_close(tbe.weights_host.detach().view(ROWS, COLUMNS), weight.detach())


def test_optimizers_of_operators_are_dense_optimizers_with_an_update_on_the_cpu():
    for name, known in TABLE_OPTIMIZERS.items():
        assert ("cpu" in known.operator_devices) == (known.update_table is not None), name
        assert not known.operator_devices or name in DENSE_OPTIMIZERS, name


def test_the_configuration_reference_names_every_optimizer_of_tables():
    assert all(f"`{name}`" in describe("tables.optimizer") for name in ROW_OPTIMIZERS)
