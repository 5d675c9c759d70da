"""Dense tensors have the names of the state dict and are live."""

import torch
from torch import nn

from cpr.shards import dense_tensors, find_shards
from tests.cpr.shards.models import bags, sequences, shard


def test_tables_and_dense_tensors_make_up_the_state_dict(world_of_one):
    layout = {"a": "tw", "b": "cw", "c": "dp", "d": "unfused"}
    model = shard(layout, bags=bags(a=5, b=4, c=3, d=2), seq=sequences(a=3, c=2))
    dense = dense_tensors(model)
    assert set(dense) == {
        *(f"dense.0.{name}" for name in ("weight", "bias")),
        *(f"dense.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
        "dense.1.num_batches_tracked",
    }
    tables = {f"{found.table_fqn}.weight" for found in find_shards(model)}
    assert len(tables) == 6
    assert dense.keys() | tables == model.state_dict().keys()
    state = model.state_dict()
    for name, tensor in dense.items():
        tensor.fill_(7)
        assert torch.all(state[name] == 7), name
        assert state[name].data_ptr() == tensor.data_ptr()
        assert not tensor.requires_grad


def test_names_with_the_prefix_of_a_table_are_dense(world_of_one):
    model = shard({"a": "tw"}, bags=bags(a=5))
    model.module.bags_of_tricks = nn.Linear(1, 1)
    assert {"bags_of_tricks.weight", "bags_of_tricks.bias"} <= dense_tensors(model).keys()
