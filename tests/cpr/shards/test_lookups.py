"""The callback receives exactly the ids that training looks up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import table_groups
from cpr.shards.lookups import LookupLayout, Lookups, watch_lookups
from dlrm.sharding.host_lookup import use_host_lookups
from tests.cpr.shards.models import bags, batch, sequences, shard
from tests.cpr.shards.test_updates import Batch, loss_of, pipelined

ROWS = {"a": 10, "b": 7, "c": 12, "d": 5, "e": 6}
LAYOUT = {"a": "tw", "b": "cw", "c": "rw", "d": "dp", "e": "unfused"}
SEQUENCES = {"a": 9, "b": 8}


class Seen:
    """Counts the observed lookups of each row, by piece of a table."""

    def __init__(self, model):
        self.groups = list(table_groups(model))
        self.passes = []
        self.hooks = watch_lookups(self.groups, self)

    def __call__(self, number, lookups):
        self.passes.append((number, lookups.rows))

    def counts(self):
        found = {}
        for number, group in enumerate(self.groups):
            rows = torch.cat([torch.empty(0, dtype=torch.int64), *(r for n, r in self.passes if n == number)])
            sizes = [table.weights.shape[0] for table in group.tables]
            assert rows.dtype == torch.int64
            counts = torch.bincount(rows, minlength=sum(sizes)).split(sizes)
            for table, count in zip(group.tables, counts, strict=True):
                found[f"{table.table_fqn}/c{table.col_offset}"] = count.tolist()
        return found


def expected(features, **rows):
    """Number of lookups of each row, from the batch itself."""
    return {
        name: torch.bincount(features[f"f_{name}"].values(), minlength=count).tolist()
        for name, count in rows.items()
    }


def assert_seen(seen, features, collection="bags.embedding_bags", rows=None):
    wanted = expected(features, **(rows or ROWS))
    for piece, counts in seen.counts().items():
        if piece.startswith(collection):
            assert counts == wanted[piece.rpartition("/")[0].rpartition(".")[2]], piece


def jagged(rows, *lengths):
    """Ids of bags of these lengths, a list for each table."""
    generator = torch.Generator().manual_seed(3)
    ids = [
        torch.randint(0, count, (sum(of_table),), generator=generator)
        for count, of_table in zip(rows.values(), lengths, strict=True)
    ]
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in rows],
        values=torch.cat(ids),
        lengths=torch.tensor([length for of_table in lengths for length in of_table]),
    )


@pytest.fixture(scope="module")
def model(world_of_one):
    return shard(LAYOUT, bags=bags(**ROWS), sequences=sequences(**SEQUENCES))


def test_lookups_of_every_kind_of_table(model):
    seen = Seen(model)
    with seen.hooks:
        loss_of(model, 0, bags=ROWS, sequences=SEQUENCES).backward()
    pieces = {piece.partition(".")[2] for piece in seen.counts()}
    assert {f"embedding_bags.{name}/c0" for name in ROWS} | {"embedding_bags.b/c4"} <= pieces
    assert {f"embeddings.{name}/c0" for name in SEQUENCES} | {"embeddings.b/c4"} <= pieces
    assert_seen(seen, batch(0, 4, **ROWS))
    assert_seen(seen, batch(0, 4, **SEQUENCES), "sequences.embeddings", SEQUENCES)


@pytest.mark.parametrize(
    "lengths",
    [
        [[1, 1, 1]] * 5,
        [[3, 0, 2], [0, 0, 0], [1, 1, 1], [5, 1, 0], [0, 0, 9]],
        [[0, 0, 0]] * 5,
    ],
    ids=["one id each", "any number of ids", "no ids"],
)
@pytest.mark.parametrize("replaced", [False, True], ids=["fbgemm", "host lookups"])
def test_lookups_of_bags_of_any_length(world_of_one, lengths, replaced):
    model = shard(LAYOUT, bags=bags(**ROWS))
    if replaced:
        assert use_host_lookups([group.emb_module for group in table_groups(model)], torch.float32)
    features = jagged(ROWS, *lengths)
    seen = Seen(model)
    with seen.hooks:
        for _ in range(2):  # the second pass uses the cached spread
            seen.passes.clear()
            model.module.bags(features).values().sum().backward()
            assert len(seen.passes) == len(seen.groups)
            assert_seen(seen, features)


def test_batches_of_different_sizes(world_of_one):
    model = shard(LAYOUT, bags=bags(**ROWS))
    seen = Seen(model)
    with seen.hooks:
        for size in (4, 2, 4, 1):
            seen.passes.clear()
            model.module.bags(batch(size, size, **ROWS)).values().sum().backward()
            assert_seen(seen, batch(size, size, **ROWS))


def test_offsets_overwritten_in_place(world_of_one):
    model = shard({"a": "tw", "b": "tw"}, bags=bags(a=10, b=7))
    seen = Seen(model)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    with seen.hooks:
        seen.groups[0].emb_module(ids, offsets).sum().backward()
        offsets[1] = 2  # moves the second id to the first table
        seen.groups[0].emb_module(ids, offsets).sum().backward()
    assert [rows.tolist() for _, rows in seen.passes] == [[1, 12, 13], [1, 2, 13]]


def test_batch_size_per_feature(world_of_one):
    model = shard({"a": "tw", "b": "tw"}, bags=bags(a=10, b=7))
    features = KeyedJaggedTensor(
        keys=["f_a", "f_b"],
        values=torch.tensor([9, 9, 0, 6]),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f_a", "f_b"], torch.tensor([[0, 1], [0, 0]])),
    )
    seen = Seen(model)
    with seen.hooks:
        model.module.bags(features).values().sum().backward()
    assert_seen(seen, features, rows={"a": 10, "b": 7})


def test_id_out_of_bounds_counts_as_the_row_looked_up(world_of_one):
    model = shard({"a": "tw", "b": "tw"}, bags=bags(a=10, b=7))
    seen = Seen(model)
    wrong = KeyedJaggedTensor(
        keys=["f_a", "f_b"], values=torch.tensor([3, 99, 6, -5]), lengths=torch.tensor([1, 1, 1, 1])
    )
    with seen.hooks:
        model.module.bags(wrong).values().sum().backward()
    assert seen.counts() == {
        "bags.embedding_bags.a/c0": [1, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        "bags.embedding_bags.b/c0": [1, 0, 0, 0, 0, 0, 1],
    }


def test_features_that_share_a_table(world_of_one):
    collection = bags(a=10, b=7)
    collection.embedding_bag_configs()[0].feature_names = ["f_a", "g_a"]
    collection._feature_names = [["f_a", "g_a"], ["f_b"]]
    for kind in ("tw", "dp"):
        model = shard({"a": kind, "b": kind}, bags=collection)
        features = KeyedJaggedTensor(
            keys=["f_a", "g_a", "f_b"], values=torch.tensor([1, 2, 2, 9, 6, 6]), lengths=torch.ones(6).long()
        )
        seen = Seen(model)
        with seen.hooks:
            model.module.bags(features).values().sum().backward()
        assert seen.counts() == {
            "bags.embedding_bags.a/c0": [0, 1, 2, 0, 0, 0, 0, 0, 0, 1],
            "bags.embedding_bags.b/c0": [0, 0, 0, 0, 0, 0, 2],
        }


def test_lookups_count_in_the_step_that_trains_their_rows(model):
    """Schedules look up a batch before the batch before it is trained."""
    seen = Seen(model)
    with seen.hooks:
        loss = loss_of(model, 0, bags=ROWS)
        loss_of(model, 1, bags=ROWS).backward()
        assert_seen(seen, batch(1, 4, **ROWS))
        seen.passes.clear()
        loss.backward()
        assert_seen(seen, batch(0, 4, **ROWS))


def test_evaluation_is_not_observed_nor_is_anything_after_removal(model):
    seen = Seen(model)
    with seen.hooks:
        with torch.no_grad():
            loss_of(model, 0, bags=ROWS)
        model.eval()
        try:
            loss_of(model, 0, bags=ROWS)
        finally:
            model.train()
    loss_of(model, 0, bags=ROWS)
    assert seen.passes == []
    assert not any(group.emb_module._forward_hooks for group in seen.groups)


def test_a_pass_that_is_not_wanted_is_left_out_and_others_count_when_they_train(model):
    passes, answers = [], iter([True, False])

    def is_wanted(number):
        return number == 0 and next(answers)

    with watch_lookups(list(table_groups(model)), lambda number, _: passes.append(number), is_wanted):
        wanted = loss_of(model, 0, bags=ROWS)
        loss_of(model, 1, bags=ROWS).backward()
        assert passes == []
        wanted.backward()
    assert passes == [0]


def test_lookups_in_a_training_pipeline(world_of_one):
    model, progress = pipelined()
    seen = Seen(model)
    with seen.hooks:
        for step in range(5):
            seen.passes.clear()
            progress()
            assert_seen(seen, Batch(step)["bags"], rows={"a": 10, "b": 7})


@given(
    lookups_of_features=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    period=st.integers(1, 5),
    data=st.data(),
)
def test_sampled_lookups(lookups_of_features, period, data):
    layout = LookupLayout(table_rows=(8, 8), feature_tables=(0, 1, 0), device=torch.device("cpu"))
    ends = torch.tensor([0, *lookups_of_features]).cumsum(0)
    num = int(ends[-1])
    lookups = Lookups(layout=layout, ids=torch.arange(num) % 8, ends=ends)
    first = data.draw(st.integers(0, period - 1))
    assert torch.equal(lookups.every(period, first).rows, lookups.rows[first::period])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lookups_do_not_wait_for_a_gpu(world_of_one):
    device = torch.device("cuda", 0)
    model = shard({"a": "tw", "b": "rw"}, device=device, bags=bags(a=10, b=7))
    features = batch(0, 4, a=10, b=7)
    passed = []
    groups = list(table_groups(model))
    with watch_lookups(groups, lambda number, lookups: passed.append((number, lookups))):
        model.module.bags(features.to(device)).values().sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = [(number, lookups.rows) for number, lookups in passed]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {found.device.type for _, found in rows} == {"cuda"}
    seen = Seen(model)
    seen.hooks.remove()
    seen.passes = [(number, found.cpu()) for number, found in rows]
    assert_seen(seen, features, rows={"a": 10, "b": 7})
