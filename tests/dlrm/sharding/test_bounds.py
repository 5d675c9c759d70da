"""An id beyond its table ends training with any lookup, and no row is trained."""

from unittest.mock import Mock

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from cpr.shards import find_shards
from dlrm.config.schema import TablesConfig
from dlrm.sharding.bounds import IdBounds
from dlrm.training import model as sharded

ROWS = {"a": 10, "b": 3, "c": 2**40}


def table(name, rows, *features):
    return EmbeddingBagConfig(
        name=f"t_{name}", embedding_dim=4, num_embeddings=rows, feature_names=list(features or name)
    )


@pytest.fixture
def bounds():
    return IdBounds(table(name, rows) for name, rows in ROWS.items())


def batch(dtype=torch.int64, **bags):
    """Of bags of ids by feature."""
    values = [torch.tensor(ids, dtype=dtype) for bag in bags.values() for ids in bag]
    return KeyedJaggedTensor(
        keys=list(bags), values=torch.cat(values), lengths=torch.tensor([len(ids) for ids in values])
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_and_last_ids_are_accepted(bounds, dtype):
    bounds.check(batch(dtype, a=[[0], [9]], b=[[2], [0]]))
    bounds.check(batch(dtype, a=[[0, 9], []], b=[[], [2]], unknown=[[-(2**31)], [2**31 - 1]]))
    bounds.check(batch(dtype, a=[[], []], b=[[], []]))


@pytest.mark.parametrize("wrong", [-1, 3, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    "others", [[[0], [9]], [[0, 1, 2], []], [[], []]], ids=["one_hot", "multi_hot", "none"]
)
def test_an_id_beyond_its_table_is_refused_by_name(bounds, others, wrong):
    with pytest.raises(
        ValueError, match=rf"feature b has the id {wrong}, but its table t_b has the rows 0 to 2"
    ):
        bounds.check(batch(a=others, b=[[1], [wrong]], c=[[7], [2**40 - 1]]))


@pytest.mark.parametrize("wrong", [-1, 3, 2**63 - 1, -(2**63)])
def test_on_a_gpu_a_batch_is_refused_when_the_next_one_is_checked(bounds, wrong, monkeypatch):
    """So that the host never waits for the batch that it has just queued."""
    monkeypatch.setattr(torch.cuda, "Event", Mock)  # what a GPU does, done by the CPU
    good, bad = (batch(a=[[0], [9, 1]], b=[[2], [id_]], c=[[], [7]]) for id_ in (0, wrong))
    for each in (good, bad):
        bounds._check_late(each, each.values())
    with pytest.raises(ValueError, match=rf"feature b has the id {wrong}, but its table t_b has the rows 0"):
        bounds._check_late(good, good.values())
    bounds._check_late(good, good.values())


def test_tables_without_pooling_have_bounds_and_cannot_be_dynamic():
    sequence = EmbeddingConfig(name="past", embedding_dim=4, num_embeddings=3, feature_names=["s"])
    with pytest.raises(
        ValueError, match=r"feature s has the id 3, but its table past has the rows 0"
    ) as caught:
        IdBounds([sequence]).check(batch(s=[[2, 3]]))
    assert "tables.dynamic" not in str(caught.value)


def test_the_smaller_of_two_tables_of_a_feature_is_the_bound():
    bounds = IdBounds([table("wide", 10, "f"), table("deep", 5, "f"), table("other", 7, "f")])
    bounds.check(batch(f=[[4]]))
    with pytest.raises(ValueError, match="id 5, but its table t_deep"):
        bounds.check(batch(f=[[5]]))


def changed(sparse, ids):
    """The batch of 16 samples with other ids at some places."""
    values = sparse.values().clone()
    for at, other in ids.items():
        values[at] = other
    return KeyedJaggedTensor(keys=sparse.keys(), values=values, lengths=sparse.lengths(), stride=16)


@pytest.mark.parametrize("lookup", ["host", "fbgemm"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("multi_hot", [False, True], ids=["one_hot", "multi_hot"])
def test_no_row_is_trained_by_an_id_beyond_a_table(
    kind, lookup, multi_hot, shard_model, make_batch, features, monkeypatch
):
    if lookup == "fbgemm":
        monkeypatch.setattr(sharded, "use_host_lookups", lambda *_: None)
    model = shard_model(dict.fromkeys((each.name for each in features), kind))
    before = [shard.weights.detach().clone() for shard in find_shards(model)]
    good = make_batch(16, seed=1, multi_hot=multi_hot)
    model(good.dense, good.sparse)
    place = sum(good.sparse.length_per_key()[:2])  # the first id of cat_2
    for wrong in (-1, 300, 2**40):
        with pytest.raises(
            ValueError, match=f"cat_2 has the id {wrong}, but its table cat_2 has the rows 0 to 299"
        ):
            model(good.dense, changed(good.sparse, {place: wrong}))
    after = [shard.weights for shard in find_shards(model)]
    assert all(map(torch.equal, after, before))


def test_ids_of_dynamic_tables_may_be_any(shard_model, make_batch):
    kinds = {"cat_2": "table_wise"}
    model = shard_model(
        kinds, tables=TablesConfig(optimizer="sgd", dynamic=("cat_2",), dynamic_rows=300, admit_after=1)
    )
    good = make_batch(16, seed=1)
    anything = {32: -1, 33: 2**40}
    model(good.dense, changed(good.sparse, anything))
    with pytest.raises(ValueError, match="cat_0 has the id 50"):
        model(good.dense, changed(good.sparse, {**anything, 0: 50}))
