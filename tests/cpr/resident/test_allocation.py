"""Tables live in the segment from the start, and those of the worker before come back bit by bit."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import batched_embedding_kernel as kernels

from cpr.errors import NotEnoughMemoryError, ResidentMemoryError
from cpr.resident import allocation as module
from cpr.resident.allocation import allocate_tables
from cpr.resident.home import Home
from cpr.shards import find_shards
from tests.cpr.resident.shards import RUN, assert_same, crash_and_find
from tests.cpr.shards.models import bags, batch, sequences, shard

pytestmark = pytest.mark.usefixtures("world_of_one")

BAGS = {"a": 40, "b": 30, "c": 20, "d": 10, "f": 15}
SEQUENCES = {"e": 25}
LAYOUT = {"a": "tw", "b": "cw", "c": "rw", "d": "dp", "f": "unfused", "e": "tw"}
OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
]
PATCHED = [
    *(module.ALLOCATOR, module.OPTIMIZER, module.COLUMNS),
    *(*module.INITIALISERS, *module.RESETS.values()),
]


def patched():
    """What stands now in place of each method that is replaced while a model is built."""
    return [getattr(module._find(*each), each[2]) for each in PATCHED]


def build(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, **rows):
    bag_rows = {**BAGS, **{name: count for name, count in rows.items() if name in BAGS}}
    sequence_rows = {**SEQUENCES, **{name: count for name, count in rows.items() if name in SEQUENCES}}
    return shard(LAYOUT, optimizer, bag=bags(**bag_rows), seq=sequences(**sequence_rows))


def train(model, first=0, end=3):
    """Real steps of every table, through forward and backward."""
    for step in range(first, end):
        pooled = model.module.bag(batch(step, 8, **BAGS)).values()
        sequences_out = model.module.seq(batch(step, 8, **SEQUENCES))
        loss = pooled.square().sum() + sum(out.values().square().sum() for out in sequences_out.values())
        loss.backward()


def resident_shards(model):
    return [s for s in find_shards(model) if not s.replicated and not s.table_fqn.endswith(".f")]


def contents(model):
    return {
        f"{s.name} {column}": tensor.clone()
        for s in resident_shards(model)
        for column, tensor in s.columns.items()
    }


def copies(model):
    """Its shards as they are now."""
    return [
        replace(
            s,
            weights=s.weights.clone(),
            optimizer_state={name: state.clone() for name, state in s.optimizer_state.items()},
        )
        for s in resident_shards(model)
    ]


def build_in(segment, adopt=False, **how):
    with allocate_tables(segment, adopt) as allocation:
        model = build(**how)
    return model, allocation


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_every_kind_of_table_comes_back_bit_by_bit(home, optimizer):
    segment = home.create("rank0")
    model, allocation = build_in(segment, optimizer=optimizer)
    assert not allocation.adopted
    left_out = segment.seal(**RUN, shards=find_shards(model))
    assert left_out == ["bag.embedding_bags.f/r0-c0"]  # of an ordinary optimizer
    train(model)
    before = contents(model)
    assert {name.split()[0] for name in before} == {
        "bag.embedding_bags.a/r0-c0",
        "bag.embedding_bags.b/r0-c0",
        "bag.embedding_bags.b/r0-c4",
        "bag.embedding_bags.c/r0-c0",
        "seq.embeddings.e/r0-c0",
    }
    del model

    found = crash_and_find(home, segment)
    again, allocation = build_in(found, adopt=True, optimizer=optimizer)
    assert (allocation.adopted, allocation.reason) == (True, "")
    after = contents(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same(resident_shards(again), found.held_shards())


def test_the_model_is_the_same_as_without(home):
    plain, (resident, _) = build(), build_in(home.create("rank0"))
    for table in resident_shards(plain):
        (twin,) = [s for s in resident_shards(resident) if s.name == table.name]
        table.weights.copy_(twin.weights)
    results = []
    for model in (plain, resident):
        train(model)
        results.append(contents(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    named = dict(resident.named_parameters())
    for name, tensor in plain.state_dict().items():
        assert resident.state_dict()[name].__class__ is tensor.__class__
        assert (name in named) == (name in dict(plain.named_parameters()))


def test_every_view_of_the_model_is_the_memory_that_the_next_worker_reads(home):
    segment = home.create("rank0")
    model, _ = build_in(segment)
    segment.seal(**RUN, shards=find_shards(model))
    held = {h.extent.table_fqn: h for h in segment.held_shards()}
    whole = held["bag.embedding_bags.a"].columns["weights"]
    for view in (
        model.state_dict()["bag.embedding_bags.a.weight"].local_shards()[0].tensor,
        dict(model.named_parameters())["bag.embedding_bags.a.weight"].view(40, 8),
        model.module.bag.embedding_bags["a"].weight.view(40, 8),
    ):
        with torch.no_grad():
            view.add_(1)
        assert torch.equal(view, whole)
    (state,) = [
        tensor
        for name, tensor in model.fused_optimizer.state_dict()["state"]["bag.embedding_bags.a.weight"].items()
        if "momentum1" in name
    ]
    state.local_shards()[0].tensor.fill_(3)
    assert (held["bag.embedding_bags.a"].columns["sum"] == 3).all()


def test_new_tables_are_initialised_and_adopted_ones_are_not_touched(home):
    segment = home.create("rank0")
    model, _ = build_in(segment)
    assert all(shard.weights.unique().numel() > 20 for shard in resident_shards(model))
    assert all((state == 0).all() for s in resident_shards(model) for state in s.optimizer_state.values())
    segment.seal(**RUN, shards=find_shards(model))
    for table in resident_shards(model):
        table.weights.fill_(42)
    again, allocation = build_in(crash_and_find(home, segment), adopt=True)
    assert allocation.adopted
    assert all((table.weights == 42).all() for table in resident_shards(again))
    # data-parallel tables are not in the segment: they get values
    (replicated,) = [table for table in find_shards(again) if table.replicated]
    assert replicated.weights.unique().numel() > 20


OTHER = "the segment holds other tables"


@pytest.mark.parametrize(
    ("rebuild", "reason"),
    [
        (partial(build, a=41), OTHER),
        (partial(build, e=26), OTHER),
        (partial(build, optimizer=EmbOptimType.EXACT_ADAGRAD), OTHER),
        (lambda: shard(LAYOUT, bag=bags(**BAGS)), "the model lacks 1 of the kernels"),
    ],
    ids=["first kernel", "last kernel", "optimizer", "fewer kernels"],
)
def test_another_model_gets_new_memory_and_the_old_content_can_still_be_read(home, rebuild, reason):
    segment = home.create("rank0")
    model, _ = build_in(segment)
    segment.seal(**RUN, shards=find_shards(model))
    train(model)
    old = copies(model)
    found = crash_and_find(home, segment)
    with allocate_tables(found, adopt=True) as allocation:
        again = rebuild()
    assert not allocation.adopted
    assert reason in allocation.reason
    new = resident_shards(again)
    assert all((state == 0).all() for s in new for state in s.optimizer_state.values())
    assert all(table.weights.unique().numel() > 20 for table in new)
    for table in new:
        table.weights.add_(1)
    assert_same(old, found.held_shards())  # training the new ones does not change it
    found.seal(**RUN, shards=find_shards(again))
    assert_same(new, found.held_shards())


def test_what_was_never_sealed_is_not_adopted(home):
    _, allocation = build_in(home.create("rank0"), adopt=True)
    assert (allocation.adopted, allocation.reason) == (False, "the segment was not sealed")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_patched(home, fails):
    before = patched()
    segment = home.create("rank0")
    if fails:
        with pytest.raises(ZeroDivisionError), allocate_tables(segment, adopt=False):
            _ = build(), 1 / 0
    else:
        build_in(segment)
    assert patched() == before
    files = set(segment.folder.iterdir())
    build()
    assert set(segment.folder.iterdir()) == files


def test_an_unknown_torchrec_is_one_clear_error(home):
    gone = {"embedding": (module.COLLECTIONS, "ShardedEmbeddingCollection", "no_such_method")}
    before = patched()
    with (
        patch.object(module, "RESETS", gone),
        pytest.raises(ResidentMemoryError, match=r"no_such_method.*use torchrec and fbgemm-gpu 1\.6"),
        allocate_tables(home.create("rank0"), adopt=False),
    ):
        pass
    assert patched() == before


def test_a_view_that_is_left_behind_is_noticed(home):
    views = []
    original = kernels.SplitTableBatchedEmbeddingBagsCodegen.__init__

    def with_a_view(self, *args, **kwargs):
        original(self, *args, **kwargs)
        views.append(self.weights_host.detach())

    with (
        patch.object(kernels.SplitTableBatchedEmbeddingBagsCodegen, "__init__", with_a_view),
        pytest.raises(ResidentMemoryError, match="views weights_host"),
    ):
        build_in(home.create("rank0"))


def test_too_little_memory_is_an_error_before_training_and_no_crash(small_root):
    with pytest.raises(NotEnoughMemoryError, match="CPR_RESIDENT_ROOT"):
        build_in(Home("run", small_root).create("rank0"), a=200_000)
