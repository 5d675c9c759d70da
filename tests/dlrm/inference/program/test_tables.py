"""Whole tables give the rows that TorchRec's collections give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm.inference.program.tables import Rows, collections_of, replace_collection, table_names

SPARSE = KeyedJaggedTensor(
    keys=["a", "b", "c"],
    values=torch.tensor([3, 3, 1, 0, 4, 2, 2, 1]),
    lengths=torch.tensor([2, 0, 1, 1, 3, 0, 0, 0, 1]),
    weights=torch.linspace(-1, 2, 8),
)
"""Three samples."""


@pytest.mark.parametrize("is_weighted", [False, True])
def test_collections_are_replaced_with_shared_tables_means_and_weights(is_weighted):
    def config(name, kind, **more):
        return kind(name=name, embedding_dim=4, num_embeddings=5, **more)

    bags = EmbeddingBagCollection(
        is_weighted=is_weighted,
        tables=[
            config("x", EmbeddingBagConfig, feature_names=["a", "b"]),
            config("y", EmbeddingBagConfig, feature_names=["b"]),
            config("z", EmbeddingBagConfig, feature_names=["c"], pooling=PoolingType.MEAN),
        ][: 2 if is_weighted else 3],  # torch has no weighted mean
    )
    sequences = EmbeddingCollection(tables=[config("x", EmbeddingConfig, feature_names=["c", "a"])])
    model = torch.nn.ModuleDict({"bags": bags, "sequences": sequences})
    state = model.state_dict()
    pooled, found = bags(SPARSE), sequences(SPARSE)
    for path, collection in collections_of(model).items():
        tables = {}
        for fqn, each in table_names(path, collection):
            tables[each.name] = Rows(5, 4, "fp32")
            tables[each.name].fill(slice(0, 5), state[f"{fqn}.weight"])
        replace_collection(model, path, collection, tables)
    ours = model["bags"](SPARSE)
    assert ours.keys() == pooled.keys()
    assert torch.allclose(ours.values(), pooled.values(), atol=1e-6)
    rows = model["sequences"](SPARSE)
    assert rows.keys() == found.keys()
    for name, bag in rows.items():
        assert torch.equal(bag.values(), found[name].values())
        assert torch.equal(bag.lengths(), found[name].lengths())


@pytest.mark.parametrize("dim", [1, 2, 3, 64])
def test_int8_rows_are_never_larger(dim):
    table = Rows(5, dim, "int8")
    assert sum(buffer.nbytes for buffer in table.buffers()) == Rows.num_bytes(5, dim, "int8")
    assert Rows.num_bytes(5, dim, "int8") <= Rows.num_bytes(5, dim, "fp32")


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), min_size=1, max_size=5))
def test_int8_rows_err_by_half_a_step(values):
    rows = torch.tensor(values)
    table = Rows(len(rows), 4, "int8")
    table.fill(torch.arange(len(rows)), rows)
    ids = torch.arange(len(rows)).flip(0)
    step = (rows.amax(1) - rows.amin(1)) / 255
    error = (table(ids) - rows[ids]).abs().amax(1)
    least = torch.finfo(torch.float32).tiny  # a smaller step cannot be told from 0
    assert (error <= 0.5 * step[ids] + 1e-6 * rows.abs().amax() + least).all()
    assert sum(each.nbytes for each in table.buffers()) == Rows.num_bytes(len(rows), 4, "int8")


@pytest.mark.parametrize("rows", ["fp32", "int8"])
def test_ids_without_a_row_of_a_dynamic_table_add_nothing(rows):
    table = Rows(3, 4, rows, torch.tensor([-(2**60), 7, 2**60]))
    values = torch.tensor([[0.0, 51, 102, 255], [1.0, 1, 1, 1], [-255, 0.0, 0, 0]])
    table.fill(slice(0, 3), values)
    ids = torch.tensor([7, 8, 2**60, 2**62, -(2**60), -(2**61)])
    expected = torch.stack([values[1], torch.zeros(4), values[2], torch.zeros(4), values[0], torch.zeros(4)])
    assert torch.allclose(table(ids), expected, atol=1e-4)
    bags = JaggedTensor(ids, lengths=torch.tensor([2, 0, 4]))
    sums = torch.stack([expected[:2].sum(0), torch.zeros(4), expected[2:].sum(0)])
    assert torch.allclose(table.pooled(bags, PoolingType.SUM, None), sums, atol=1e-4)
