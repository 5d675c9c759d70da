"""Additional columns are treated as part of the rows."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from cpr.checkpoint.save.snapshot import can_wait
from cpr.shards import add_row_columns, before_updates, find_shards, table_groups
from tests.cpr.shards.models import bags, batch, shard

pytestmark = pytest.mark.usefixtures("world_of_one")

ROWS = {"a": 10, "b": 7}


def build(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD):
    return shard({"a": "tw", "b": "tw"}, optimizer, bags=bags(**ROWS))


def add_to_b(model, dtypes, written=lambda: None):
    (group,) = table_groups(model)
    place = [table.table_name for table in group.tables].index("b")
    return add_row_columns(group, place, dtypes, written).tensors


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(EmbOptimType.EXACT_SGD, set()), (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"sum"})],
)
def test_columns_are_live_and_of_one_table(optimizer, states):
    model = build(optimizer)
    added = add_to_b(model, {"id": torch.int64, "age": torch.int32})
    a, b = find_shards(model)
    assert set(a.optimizer_state) == states
    assert set(b.optimizer_state) == {"id", "age", *states}
    b.columns["id"][3] = -(2**63)
    assert added["id"].tolist() == [0, 0, 0, -(2**63), 0, 0, 0]
    assert added["age"].dtype == torch.int32
    assert b.narrow(3, 5).columns["id"].tolist() == [-(2**63), 0]
    assert b.bytes_per_row == a.bytes_per_row + 12


def test_invalidate_notifies_the_owner_of_columns():
    model, calls = build(), []
    add_to_b(model, {"id": torch.int64}, lambda: calls.append("b"))
    a, b = find_shards(model)
    a.invalidate()
    assert calls == []
    b.invalidate()
    assert calls == ["b"]


def test_changes_of_columns_in_the_forward_pass_are_announced():
    model, order = build(), []
    add_to_b(model, {"id": torch.int64})
    (group,) = table_groups(model)
    group.emb_module.register_forward_pre_hook(lambda *_: order.append("changes"))
    a, b = find_shards(model)
    assert (can_wait(a), can_wait(b)) == (True, False)
    with before_updates(model, (), lambda: order.append("announced")):
        loss = model({"bags": batch(0, 4, **ROWS)}).square().sum()
        assert order == ["announced", "changes"]
        loss.backward()
        assert order == ["announced", "changes", "announced"]
        model.eval()
        model({"bags": batch(0, 4, **ROWS)})
    assert order == ["announced", "changes", "announced", "changes"]


@pytest.mark.parametrize("name", ["weights", "sum", "row", "id"])
def test_duplicate_names_are_refused(name):
    model = build()
    add_to_b(model, {"id": torch.int64})
    with pytest.raises(ValueError, match=f"called \\['{name}'\\]"):
        add_to_b(model, {name: torch.int64})
