"""What was added to the rows of a table survives the worker with them."""

import pytest
import torch

from cpr.resident.allocation import allocate_tables
from cpr.shards import add_row_columns, find_shards, table_groups
from tests.cpr.resident.shards import RUN, assert_same, crash_and_find
from tests.cpr.shards.models import bags, shard

pytestmark = pytest.mark.usefixtures("world_of_one")


def build_in(segment, adopt=False, **dtypes):
    """Tables of which one has more columns."""
    with allocate_tables(segment, adopt) as allocation:
        model = shard({"a": "tw", "b": "tw"}, bags=bags(a=40, b=30))
        if dtypes:
            (group,) = table_groups(model)
            add_row_columns(group, 0, dtypes, lambda: None)
    return find_shards(model), allocation


def test_they_come_back_with_the_rows(home):
    other = home.create("rank1")
    _, plain = build_in(other)
    other.remove()
    segment = home.create("rank0")
    shards, allocation = build_in(segment, id=torch.int64, age=torch.int32)
    assert allocation.num_bytes == plain.num_bytes + 40 * (8 + 4)
    assert segment.seal(**RUN, shards=shards) == []
    shards[0].columns["id"].copy_(torch.arange(40) - 2**63)
    shards[0].columns["age"].fill_(3)
    wanted = {name: tensor.clone() for name, tensor in shards[0].columns.items()}

    found = crash_and_find(home, segment)
    again, allocation = build_in(found, True, id=torch.int64, age=torch.int32)
    assert (allocation.adopted, allocation.reason) == (True, "")
    assert all(torch.equal(again[0].columns[name], tensor) for name, tensor in wanted.items())
    assert_same(again, found.held_shards())
    assert all(found.holds(each) for each in again)


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ({}, "the model lacks 1 of the kernels"),
        ({"id": torch.int32}, "other tables than the columns of bags.embedding_bags.a"),
        ({"id": torch.int64, "age": torch.int32}, "other tables than the columns of bags.embedding_bags.a"),
    ],
)
def test_with_other_columns_all_is_new_and_the_old_is_still_held(home, dtypes, reason):
    segment = home.create("rank0")
    shards, _ = build_in(segment, id=torch.int64)
    segment.seal(**RUN, shards=shards)
    shards[0].columns["id"].fill_(5)
    shards[1].weights.fill_(6.0)

    found = crash_and_find(home, segment)
    again, allocation = build_in(found, True, **dtypes)
    assert not allocation.adopted
    assert reason in allocation.reason
    assert not any(again[0].columns[name].any() for name in dtypes)
    assert again[1].weights.abs().max() < 6
    old = {held.extent.table_fqn: held for held in found.held_shards()}
    assert old["bags.embedding_bags.a"].columns["id"].eq(5).all()
    assert old["bags.embedding_bags.b"].columns["weights"].eq(6).all()
